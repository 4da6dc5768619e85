// Launches the Ampere-class forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/cuda_check.h"
#include "common/mask.h"
#include "params.h"
#include "sm80/forward_kernel.cuh"

namespace flash::sm80 {

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

template <typename T, int kHeadDim, FeatureSet kFeatures>
void launch_forward(ForwardParams params, cudaStream_t stream) {
  using Config = ForwardConfig<T, kHeadDim, kFeatures>;
  constexpr auto kKernel = forward_kernel<Config>;
  constexpr size_t kSharedBytes = sizeof(typename Config::SharedStorage);
  constexpr int kMaxGrid = 65535;  // in y and z; more takes further launches

  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, kSharedBytes, devices);

  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  const int num_m_blocks = (params.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  for (int batch = 0; batch < params.batch; batch += kMaxGrid) {
    for (int m_block = 0; m_block < num_m_blocks; m_block += kMaxGrid) {
      // Heads come first: the blocks that run together share K and V within a group of heads and,
      // among the query blocks of one head, in the L2 cache.
      const dim3 grid(params.nheads, std::min(num_m_blocks - m_block, kMaxGrid),
                      std::min(params.batch - batch, kMaxGrid));
      kKernel<<<grid, Config::kThreads, kSharedBytes, stream>>>(params, m_block, batch);
      check_cuda(cudaGetLastError(), "launch of the sm80 forward kernel");
    }
  }
}

}  // namespace flash::sm80
