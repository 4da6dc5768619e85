// Launches the Ampere-class forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/mask.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/clear_gaps.cuh"
#include "sm80/forward_kernel.cuh"
#include "sm80/tile_choice.h"

namespace flash::sm80 {

template <typename Config>
void launch_forward_kernel(ForwardParams params, cudaStream_t stream) {
  constexpr auto kKernel = forward_kernel<Config>;

  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, Config::kSharedBytes, devices);

  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  const float scale_log2 = scale_log2_of(params);
  if (params.cu_seqlens_q != nullptr) {
    launch_clear_gaps<typename Config::T>(params, stream);
  }
  const int num_m_blocks = (params.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  for (int batch = 0; batch < params.batch; batch += kMaxGrid) {
    for (int m_block = 0; m_block < num_m_blocks; m_block += kMaxGrid) {
      // Heads come first: the blocks that run together share K and V within a group of heads and,
      // among the query blocks of one head, in the L2 cache.
      const dim3 grid(params.nheads, std::min(num_m_blocks - m_block, kMaxGrid),
                      std::min(params.batch - batch, kMaxGrid));
      kKernel<<<grid, Config::kThreads, Config::kSharedBytes, stream>>>(params, m_block, batch,
                                                                        scale_log2);
      check_cuda(cudaGetLastError(), "launch of the sm80 forward kernel");
    }
  }
}

template <typename T, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
  launch_with_fitting_tile<ForwardConfig<T, kHeadDim, kHeadDimV, kFeatures>>(
      params.shared_memory,
      [&](auto config) { launch_forward_kernel<decltype(config)>(params, stream); });
}

template <typename T, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct ForwardRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes =
      features_of(kFeatures) | kCacheSlots | (kFeatures == FeatureSet::kFull ? kAnyAlignment : 0);
  static constexpr int kTiles = 1;

  static auto prepare(Params&, Workspaces&) {
    return launch_forward<T, kHeadDim, kHeadDimV, kFeatures>;
  }
};

}  // namespace flash::sm80
