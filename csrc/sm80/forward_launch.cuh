// Launches the Ampere-class forward.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "common/sequence_tiles.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/clear_gaps.cuh"
#include "sm80/forward_kernel.cuh"
#include "sm80/forward_plan.h"

namespace flash::sm80 {

// If tiles are packed, all sequences count as one: see QueryBlock.
struct LaunchSize {
  int all_m_blocks, all_batch;  // blocks of queries, sequences
  // At a time. Of divided tiles what leaves kMostPartBytes at most, or one block of queries of all
  // heads.
  int m_blocks, batch;
  SequenceTiles tiles;

  LaunchSize(const ForwardParams& params, int block_m, int headdim_v)
      : tiles(SequenceTiles::of_queries(params, block_m).fewest()) {
    all_batch = tiles.packed() ? 1 : params.batch;
    const int64_t blocks = tiles.count() / all_batch;
    if (blocks > INT_MAX) {
      throw std::invalid_argument("blocks of queries: got " + std::to_string(blocks) +
                                  "; accepted: up to 2^31 - 1");
    }
    all_m_blocks = static_cast<int>(blocks);
    int64_t most = int64_t{kMaxGrid} * kMaxGrid;  // blocks of queries, of all heads
    const int64_t most_blocks = kMaxGrid / params.num_splits;
    if (params.num_splits > 1) {
      const int64_t rows = int64_t{params.nheads} * params.num_splits * block_m;
      most = kMostPartBytes / (rows * headdim_v * static_cast<int64_t>(sizeof(float)));
    }
    most = std::max<int64_t>(most, 1);
    m_blocks = static_cast<int>(std::min({int64_t{all_m_blocks}, most, most_blocks}));
    batch =
        static_cast<int>(std::clamp<int64_t>(most / m_blocks, 1, std::min(all_batch, kMaxGrid)));
  }
};

template <typename Config>
void launch_forward(ForwardParams params, cudaStream_t stream) {
  constexpr auto kKernel = forward_kernel<Config>;

  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, Config::kSharedBytes, devices);

  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  const float scale_log2 = scale_log2_of(params);
  const Divisor page_size(std::max(params.page_size, 1));
  if (params.cu_seqlens_q != nullptr) {
    launch_clear_gaps<typename Config::T>(params, stream);
  }
  const LaunchSize most(params, Config::kBlockM, Config::kHeadDimV);
  for (int batch = 0; batch < most.all_batch; batch += most.batch) {
    for (int m_block = 0; m_block < most.all_m_blocks; m_block += most.m_blocks) {
      // Heads come first: the blocks that run together share K and V within a group of heads and,
      // among the query blocks of one head, in the L2 cache.
      const int blocks = std::min(most.all_m_blocks - m_block, most.m_blocks);
      const int sequences = std::min(most.all_batch - batch, most.batch);
      const dim3 grid(params.nheads, blocks * params.num_splits, sequences);
      kKernel<<<grid, Config::kThreads, Config::kSharedBytes, stream>>>(
          params, most.tiles, page_size, m_block, batch, scale_log2);
      check_cuda(cudaGetLastError(), "launch of the sm80 forward kernel");
      if constexpr (Config::kDivided) {
        const int64_t fours = int64_t{params.nheads} * Config::kBlockM * (Config::kHeadDimV / 4);
        const auto mergers = static_cast<unsigned>((fours - 1) / kMergeThreads + 1);
        merge_parts_kernel<Config><<<dim3(mergers, blocks, sequences), kMergeThreads, 0, stream>>>(
            params, most.tiles, m_block, batch);
        check_cuda(cudaGetLastError(), "launch of the kernel that merges parts of an sm80 forward");
      }
    }
  }
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct ForwardRow {
  static_assert(std::is_same_v<T, KV> && std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr bool kFull = kFeatures == FeatureSet::kFull;
  static constexpr bool kTakesPages = takes_pages(kFeatures, kHeadDim);
  static constexpr uint32_t kTakes = features_of(kFeatures) | kCacheSlots |
                                     (kTakesPages ? kPages : 0) | (kFull ? kAnyAlignment : 0);
  static constexpr int kTiles = count_forward_tiles(kHeadDim, kHeadDimV);

  static auto prepare(Params& params, Workspaces& wanted) {
    constexpr std::make_integer_sequence<int, kTiles> kChoices;
    if constexpr (kFull) {
      return choose_launcher<true>(params, wanted, kChoices);
    } else {
      if constexpr (kTakesPages) {
        if (params.block_table != nullptr) return choose_launcher<true>(params, wanted, kChoices);
      }
      return choose_launcher<false>(params, wanted, kChoices);
    }
  }

 private:
  template <int kChoice, bool kPaged, bool kDivided>
  using Config = ForwardConfig<T, kHeadDim, kHeadDimV, kFeatures, kChoice, kPaged, kDivided>;

  template <bool kPaged, int... kChoices>
  static auto choose_launcher(Params& params, Workspaces& wanted,
                              std::integer_sequence<int, kChoices...>) {
    constexpr ForwardShape kShapes[] = {
        {Config<kChoices, kPaged, false>::kTile, Config<kChoices, kPaged, false>::kSharedBytes}...};
    constexpr void (*kWhole[])(Params,
                               cudaStream_t) = {launch_forward<Config<kChoices, kPaged, false>>...};
    constexpr void (*kDivided[])(
        Params, cudaStream_t) = {launch_forward<Config<kChoices, kPaged, true>>...};
    const ForwardPlan plan = plan_forward(params, kHeadDimV, kShapes);
    params.num_splits = plan.splits;
    if (plan.splits == 1) return kWhole[plan.tile];
    const int block_m = kShapes[plan.tile].tile.block_m;
    const LaunchSize most(params, block_m, kHeadDimV);
    const int64_t tiles = int64_t{params.nheads} * most.m_blocks * most.batch;
    wanted.add("partial_out", params.partial_out, tiles * plan.splits * block_m * kHeadDimV);
    wanted.add("partial_rows", params.partial_rows, tiles * plan.splits * block_m * 2);
    return kDivided[plan.tile];
  }
};

}  // namespace flash::sm80
