// From run-time values to one compiled kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>
#include <utility>
#include <vector>

#include "params.h"

namespace flash {

using ForwardLauncher = void (*)(const ForwardParams&, cudaStream_t);
using BackwardLauncher = void (*)(const BackwardParams&, cudaStream_t);

// What a kernel was compiled for.
struct KernelKey {
  std::string_view family;  // "sm80"
  DType dtype;
  int headdim, headdim_v;  // the largest that it takes
  FeatureSet features;
};

// A row of the dispatch table.
template <typename Launcher>
struct Instantiation {
  KernelKey key;
  Launcher launch;
};

// The rows of this build, each with its pass, "forward" or "backward".
std::vector<std::pair<const char*, KernelKey>> instantiations();

// Throw std::invalid_argument, naming what is missing and what is built; also if the head dims of
// `params` are larger than the kernel's.
ForwardLauncher find_forward(const KernelKey& key, const AttentionParams& params);
BackwardLauncher find_backward(const KernelKey& key, const AttentionParams& params);

// Bytes of shared memory that one thread block of the device may use.
int max_shared_memory(int device);

const char* name(DType dtype);
const char* name(FeatureSet features);

}  // namespace flash
