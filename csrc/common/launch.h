// What every kernel launch needs.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/cuda_check.h"

namespace flash {

constexpr int kMaxGrid = 65535;  // in y and z; more takes further launches

// Lets `kernel` use `bytes` of dynamic shared memory, once a device. `devices` is the set of those
// done, the kernel's own.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes, std::atomic<uint64_t>& devices) {
  int device;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices.load(std::memory_order_relaxed) & bit) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  devices.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace flash
