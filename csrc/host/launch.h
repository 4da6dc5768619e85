// What every launch of a kernel needs. Host code.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "host/cuda_check.h"

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

// Launches a kernel that calls ptx::wait_for_earlier_kernels: its thread blocks may start while the
// stream's kernel before is ending.
template <typename... Parameters, typename... Arguments>
void launch_overlapping(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                        cudaStream_t stream, const char* call, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), call);
}

// A window side as Mask takes it: -1 (unbounded) becomes as wide as the longest sequence. Wider
// ones are cut to that too, so that sums with it stay inside an int.
inline int bounded_window(int window, int max_seqlen) {
  return window < 0 || window > max_seqlen ? max_seqlen : window;
}

// Of the current device.
inline int multiprocessors() {
  static std::array<std::atomic<int>, 64> known{};
  int device, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device < 64) count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute(MultiProcessorCount)");
    if (device < 64) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace flash
