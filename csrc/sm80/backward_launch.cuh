// Launches the Ampere-class backward.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
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
#include "sm80/clear_gaps.cuh"
#include "sm80/tile_choice.h"

namespace flash::sm80 {

// Of what is read again and again, this much should stay in the L2 cache.
constexpr int64_t kTogetherBytes = 32 << 20;

// Where dQ is added to in order, thread blocks of one head wait for each other: fewer of them run
// at a time if more heads do.
constexpr int64_t kOrderedHeads = 32;

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

// Blocks of keys. Heads of several sequences wait less for each other than one head's blocks, so dQ
// that is added to in order does not take one sequence after the other.
inline SequenceTiles key_tiles(const BackwardParams& params, int block_n) {
  const SequenceTiles tiles = SequenceTiles::of_keys(params, block_n);
  return params.deterministic ? tiles.equally_many() : tiles.fewest();
}

// Into how many parts, of some query heads each, the thread blocks' work is divided. Each SM gets
// at most this many thread blocks for each that it holds at a time, if that takes parts: each needs
// dK and dV in float32.
constexpr int64_t kRounds = 4;

template <typename Config>
int backward_splits(const BackwardParams& params) {
  const int64_t tiles = key_tiles(params, Config::kBlockN).count() * params.nheads_kv;
  if (tiles == 0 || tiles >= kKeptZero) return 1;
  const int64_t wanted = kRounds * Config::kBlocksPerSm * multiprocessors();
  const int64_t group = params.nheads / params.nheads_kv;
  return static_cast<int>(std::clamp<int64_t>(wanted / tiles, 1, group));
}

template <typename Config>
void launch_backward_main(const BackwardParams& params, cudaStream_t stream) {
  constexpr auto kKernel = backward_kernel<Config>;
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, Config::kSharedBytes, devices);
  const SequenceTiles tiles = key_tiles(params, Config::kBlockN);
  const int64_t blocks = tiles.count() * params.nheads_kv;
  if (blocks > INT_MAX) {
    throw std::invalid_argument("batch * nheads_kv * key blocks: got " + std::to_string(blocks) +
                                "; accepted: up to 2^31 - 1");
  }
  // What the thread blocks of one head of K and V read again and again: Q, dO and dQ of one head of
  // Q at a time.
  const int64_t bytes = int64_t{params.seqlen_q} *
                        (sizeof(typename Config::T) * (Config::kHeadDim + Config::kHeadDimV) +
                         sizeof(float) * Config::kHeadDim);
  const int64_t least = params.dq_turn == nullptr ? 1 : kOrderedHeads;
  const int64_t heads = int64_t{tiles.packed() ? 1 : params.batch} * params.nheads_kv;
  const int64_t heads_together = std::min(std::max(kTogetherBytes / bytes, least), heads);
  const int splits = backward_splits<Config>(params);
  kKernel<<<static_cast<unsigned>(blocks * splits), Config::kThreads, Config::kSharedBytes,
            stream>>>(params, tiles, static_cast<int>(blocks / heads),
                      static_cast<int>(heads_together), splits);
  check_cuda(cudaGetLastError(), "launch of the sm80 backward kernel");
}

template <typename T, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
void launch_backward(BackwardParams params, cudaStream_t stream) {
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
      [&](auto config) { launch_backward_main<decltype(config)>(params, stream); });
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
    launch_with_fitting_tile<Config>(params.shared_memory, [&](auto config) {
      using Fitting = decltype(config);
      const int64_t splits = backward_splits<Fitting>(params);
      if (splits == 1) return;
      wanted.add("partial_dkv", params.partial_dkv,
                 splits * params.nheads_kv * key_tiles(params, Fitting::kBlockN).count() *
                     Fitting::kBlockN * (kHeadDim + kHeadDimV));
      wanted.add_kept_zero("counters", params.counters);
    });
    return launch_backward<T, kHeadDim, kHeadDimV, kFeatures>;
  }
};

}  // namespace flash::sm80
