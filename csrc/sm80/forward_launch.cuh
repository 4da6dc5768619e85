// Launches the Ampere-class forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "common/mask.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/clear_gaps.cuh"
#include "sm80/forward_kernel.cuh"
#include "sm80/forward_plan.h"

namespace flash::sm80 {

template <typename Config>
void launch_forward(ForwardParams params, cudaStream_t stream) {
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

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct ForwardRow {
  static_assert(std::is_same_v<T, KV> && std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes = features_of(kFeatures) | kCacheSlots |
                                     (kFeatures == FeatureSet::kFull ? kAnyAlignment | kPages : 0);
  static constexpr int kTiles = count_forward_tiles(kHeadDim, kHeadDimV);

  static auto prepare(Params& params, Workspaces&) {
    if (params.num_splits > 1) {
      throw std::invalid_argument("num_splits: got " + std::to_string(params.num_splits) +
                                  "; accepted by the sm80 forward: 0 or 1");
    }
    return choose_launcher(params, std::make_integer_sequence<int, kTiles>());
  }

 private:
  template <int kChoice>
  using Config = ForwardConfig<T, kHeadDim, kHeadDimV, kFeatures, kChoice>;

  template <int... kChoices>
  static auto choose_launcher(const Params& params, std::integer_sequence<int, kChoices...>) {
    constexpr ForwardShape kShapes[] = {
        {Config<kChoices>::kTile, Config<kChoices>::kSharedBytes}...};
    constexpr void (*kLaunchers[])(Params, cudaStream_t) = {launch_forward<Config<kChoices>>...};
    return kLaunchers[choose_forward_tile(params, kShapes)];
  }
};

}  // namespace flash::sm80
