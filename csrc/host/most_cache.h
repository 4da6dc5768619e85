// Launches of kernels that copy. Host code.
#pragma once

#include "host/launch.h"

namespace flash {

// Of a kernel without shared memory: as much of an SM's memory as can be is L1 cache, which holds
// the loads that are under way. Else it is what the kernel before has left, which may be too little
// for all of the memory's bandwidth. But SMs are empty for a moment when they change it.
inline cudaLaunchAttribute with_most_cache() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxL1;
  return attribute;
}

// Drivers know the attribute since CUDA 12.5.
inline bool knows_most_cache() {
  static const bool knows = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12050;
  }();
  return knows;
}

// large: the kernel is worth the change
template <typename... Arguments>
void launch_copying(bool large, const Arguments&... arguments) {
  if (large && knows_most_cache()) {
    launch(std::array{overlapping(), with_most_cache()}, arguments...);
  } else {
    launch_overlapping(arguments...);
  }
}

}  // namespace flash
