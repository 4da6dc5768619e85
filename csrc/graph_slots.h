// Whose memory it is that kernels keep zero: a stream's, or a CUDA graph's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

namespace flash {

// Graphs that have such memory at the same time, each for every stream that it was captured from.
constexpr int kGraphSlots = 256;

// Kernels of one owner follow each other. Of a stream: its id, which no other stream of the process
// ever has. (A handle may be another stream's later, or mean each thread's own, or, as the default
// stream's, that of the green context that is current.) Of a stream under capture: -1 - slot, of 0
// .. kGraphSlots - 1, which belongs to the graph until that is destroyed; none if all are taken.
std::optional<int64_t> zeros_owner(cudaStream_t stream);

}  // namespace flash
