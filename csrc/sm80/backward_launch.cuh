// Launches the Ampere-class backward.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/sequence_tiles.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/backward_kernel.cuh"
#include "sm80/backward_plan.h"
#include "sm80/clear_gaps.cuh"
#include "sm80/tile_choice.h"

namespace flash::sm80 {

constexpr int64_t kMostRowTiles = 1 << 28;  // of all heads

// Of one head in the dQ workspace: see dq_tile.
inline int row_tiles(const BackwardParams& params) {
  const int64_t tiles = SequenceTiles::of_queries(params, 16).count();
  if (tiles * params.nheads > kMostRowTiles) {
    throw std::invalid_argument("nheads * blocks of 16 queries: got " +
                                std::to_string(tiles * params.nheads) + "; accepted: up to 2^28");
  }
  return static_cast<int>(tiles);
}

template <typename Config>
KeyBlockOrder plan_key_blocks(const BackwardParams& params) {
  constexpr int64_t kRowBytes =
      sizeof(typename Config::T) * (Config::kHeadDim + Config::kHeadDimV) +
      sizeof(float) * Config::kHeadDim;
  return plan_key_blocks(params, Config::kBlockM, Config::kBlockN, kRowBytes,
                         Config::kBlocksPerSm * multiprocessors());
}

template <typename Config>
void launch_backward_main(const BackwardParams& params, const KeyBlockOrder& order,
                          cudaStream_t stream) {
  constexpr auto kKernel = backward_kernel<Config>;
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, Config::kSharedBytes, devices);
  const SequenceTiles tiles = key_tiles(params, Config::kBlockN);
  kKernel<<<static_cast<unsigned>(count_parts(params, tiles, order)), Config::kThreads,
            Config::kSharedBytes, stream>>>(params, tiles, order);
  check_cuda(cudaGetLastError(), "launch of the sm80 backward kernel");
}

template <typename T, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
void launch_backward(BackwardParams params, const KeyBlockOrder& order, cudaStream_t stream) {
  constexpr bool kAnyAlignment = kFeatures == FeatureSet::kFull;
  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  params.row_tiles = row_tiles(params);
  if (params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr ||
      params.seqused_k != nullptr || params.leftpad_k != nullptr) {
    launch_clear_gaps<T>(params, stream);
  }
  const auto blocks_of = [&](const SequenceTiles& tiles) {
    return static_cast<unsigned>(tiles.count() * params.nheads);
  };
  const SequenceTiles delta_tiles = SequenceTiles::of_queries(params, 16).fewest();
  const SequenceTiles dq_tiles = SequenceTiles::of_queries(params, kDqTile).fewest();
  constexpr unsigned kDeltaParts = 16 / kDeltaRows<kHeadDimV>;
  backward_delta_kernel<T, kHeadDim, kHeadDimV, kAnyAlignment>
      <<<blocks_of(delta_tiles) * kDeltaParts, kDeltaThreads<kHeadDimV>, 0, stream>>>(params,
                                                                                      delta_tiles);
  check_cuda(cudaGetLastError(), "launch of the sm80 delta kernel");
  launch_with_fitting_tile<BackwardConfig<T, kHeadDim, kHeadDimV, kFeatures>>(
      params.shared_memory,
      [&](auto config) { launch_backward_main<decltype(config)>(params, order, stream); });
  backward_dq_kernel<T, kHeadDim, kAnyAlignment>
      <<<blocks_of(dq_tiles), 128, 0, stream>>>(params, dq_tiles);
  check_cuda(cudaGetLastError(), "launch of the sm80 dQ kernel");
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct BackwardRow {
  static_assert(std::is_same_v<T, KV> && std::is_same_v<T, Out>);
  using Params = BackwardParams;
  static constexpr uint32_t kTakes =
      features_of(kFeatures) | (kFeatures == FeatureSet::kFull ? kAnyAlignment : 0);
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces& wanted) {
    const int64_t tiles = int64_t{params.nheads} * row_tiles(params);
    wanted.add("dq_accum", params.dq_accum, tiles * 16 * kHeadDim);
    if (params.deterministic) wanted.add("dq_turn", params.dq_turn, tiles);
    using Config = BackwardConfig<T, kHeadDim, kHeadDimV, kFeatures>;
    KeyBlockOrder order{};
    launch_with_fitting_tile<Config>(params.shared_memory, [&](auto config) {
      using Fitting = decltype(config);
      order = plan_key_blocks<Fitting>(params);
      if (order.splits == 1 && order.unequal.blocks == 0) return;
      const int64_t parts = count_parts(params, key_tiles(params, Fitting::kBlockN), order);
      wanted.add("partial_dkv", params.partial_dkv,
                 parts * Fitting::kBlockN * (kHeadDim + kHeadDimV));
      wanted.add_kept_zero("counters", params.counters);
    });
    return [order](const Params& bound, cudaStream_t stream) {
      launch_backward<T, kHeadDim, kHeadDimV, kFeatures>(bound, order, stream);
    };
  }
};

}  // namespace flash::sm80
