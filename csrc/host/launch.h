// What every launch of a kernel needs. Host code.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <future>

#include "host/cuda_check.h"

namespace flash {

constexpr int kMaxGrid = 65535;      // in y and z; more takes further launches
constexpr int kPortableCluster = 8;  // thread blocks, for which a green context has room

// Sets an attribute of `kernel`, once a device. `devices` is the set of those done, the attribute's
// own.
template <typename Kernel>
void allow(Kernel kernel, cudaFuncAttribute attribute, int value, std::atomic<uint64_t>& devices) {
  int device;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices.load(std::memory_order_relaxed) & bit) return;
  check_cuda(cudaFuncSetAttribute(kernel, attribute, value), "cudaFuncSetAttribute");
  devices.fetch_or(bit, std::memory_order_relaxed);
}

// Lets `kernel` use `bytes` of dynamic shared memory.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes, std::atomic<uint64_t>& devices) {
  allow(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes), devices);
}

// Thread blocks may start while the stream's kernel before is ending: the kernel calls
// ptx::wait_for_earlier_kernels.
inline cudaLaunchAttribute overlapping() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// All thread blocks run at the same time. If there is no room, the launch fails, but a captured one
// waits forever: see clusters_at_a_time.
inline cudaLaunchAttribute together() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

inline cudaLaunchAttribute in_clusters(dim3 size) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {size.x, size.y, size.z};
  return attribute;
}

template <size_t kAttributes, typename... Parameters, typename... Arguments>
void launch(std::array<cudaLaunchAttribute, kAttributes> attributes, void (*kernel)(Parameters...),
            dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const char* call,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = kAttributes;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), call);
}

template <typename... Arguments>
void launch_overlapping(const Arguments&... arguments) {
  launch(std::array{overlapping()}, arguments...);
}

// A window side as Mask takes it: -1 (unbounded) becomes as wide as the longest sequence. Wider
// ones are cut to that too, so that sums with it stay inside an int.
inline int bounded_window(int window, int max_seqlen) {
  return window < 0 || window > max_seqlen ? max_seqlen : window;
}

// What is known of each device; 0: not yet.
using DeviceFacts = std::array<std::atomic<int>, 64>;

// Of the current device: query(device), asked once.
template <typename Query>
int of_device(DeviceFacts& known, Query query) {
  int device;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= static_cast<int>(known.size())) return query(device);
  int fact = known[device].load(std::memory_order_relaxed);
  if (fact == 0) {
    fact = query(device);
    known[device].store(fact, std::memory_order_relaxed);
  }
  return fact;
}

inline int multiprocessors() {
  static DeviceFacts known{};
  return of_device(known, [](int device) {
    int count;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute(MultiProcessorCount)");
    return count;
  });
}

// How many clusters of the stream run at a time: a green context has some of the device's SMs.
inline int clusters_at_a_time(const void* kernel, dim3 size, int threads, size_t shared_bytes,
                              cudaStream_t stream) {
  cudaLaunchAttribute cluster = in_clusters(size);
  cudaLaunchConfig_t config{};
  config.gridDim = size;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config),
             "cudaOccupancyMaxActiveClusters");
  return count;
}

// The same of the whole device, also where a green context is current: a new thread is in none.
// known: of the kernel with this size
inline int clusters_of_device(const void* kernel, dim3 size, int threads, size_t shared_bytes,
                              DeviceFacts& known) {
  return of_device(known, [=](int device) {
    const auto ask = [=] {
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
      return clusters_at_a_time(kernel, size, threads, shared_bytes, nullptr);
    };
    return std::async(std::launch::async, ask).get();
  });
}

}  // namespace flash
