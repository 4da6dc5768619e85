// The L1 cache of kernels that copy. Host code.
#pragma once

#include <cstdint>

#include "host/cuda_check.h"

namespace flash {

// An attribute for the launch of a kernel without shared memory that reads or writes so many bytes.
// If they are many: as much of an SM's memory as can be is L1 cache, which holds the loads that are
// under way. Else it is what the kernel before has left, which may be too little for all of the
// memory's bandwidth. But SMs are empty for a moment when they change it. Drivers know the
// attribute since CUDA 12.5.
inline cudaLaunchAttribute most_cache(int64_t bytes) {
  constexpr int64_t kMany = 32 << 20;
  static const bool known = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12050;
  }();
  cudaLaunchAttribute attribute{};  // to be ignored
  if (bytes >= kMany && known) {
    attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxL1;
  }
  return attribute;
}

}  // namespace flash
