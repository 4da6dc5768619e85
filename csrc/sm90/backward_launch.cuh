// Launches the Hopper backward.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/mask.h"
#include "common/range.h"
#include "common/scores.h"
#include "common/sequence_tiles.h"
#include "host/launch.h"
#include "host/most_cache.h"
#include "kernel.h"
#include "params.h"
#include "sm90/backward_end.cuh"
#include "sm90/backward_kernel.cuh"
#include "sm90/backward_plan.h"
#include "sm90/long_backward_config.cuh"
#include "sm90/tensor_map.h"
#include "sm90/wide_backward_kernel.cuh"

namespace flash::sm90 {

// Thread blocks that look for rows of no sequence, at most: each reads the bounds of all.
constexpr int kClearing = 512;

// With so few thread blocks for each SM, or fewer, an end kernel that adds parts takes so much
// shared memory that two of them fit an SM: more would crowd the SMs that are free first.
constexpr int kFewEndBlocks = 4;
constexpr size_t kHalfSharedMemory = 100 << 10;

constexpr int64_t kMostRowTiles = 1 << 28;  // of all heads, each of a few thread blocks

// Of one head in the workspaces: see dq_tile.
inline int row_tiles(const BackwardParams& params, int rows) {
  const int64_t tiles = SequenceTiles::of_queries(params, rows).count();
  if (tiles * params.nheads > kMostRowTiles) {
    throw std::invalid_argument("nheads * blocks of " + std::to_string(rows) + " queries: got " +
                                std::to_string(tiles * params.nheads) + "; accepted: up to 2^28");
  }
  return static_cast<int>(tiles);
}

[[noreturn]] inline void refuse_tiles(int64_t tiles) {
  throw std::invalid_argument("batch * nheads_kv * key blocks: got " + std::to_string(tiles) +
                              "; accepted: up to 2^31 - 1");
}

// Of all tiles of the heads that share K and V, if sequences are dense: counted as the kernel does,
// since idle warps wait for all of them.
template <typename Config>
int64_t head_steps(const BackwardParams& params) {
  const Mask mask{params.seqlen_k, params.seqlen_k - params.seqlen_q, params.window_left,
                  params.window_right};
  int64_t steps = 0;
  for (int key = 0; key < params.seqlen_k; key += Config::kBlockN) {
    const Range blocks =
        query_blocks<Config::kBlockM>(mask, params.seqlen_q, key, key + Config::kBlockN);
    steps += std::max(blocks.end - blocks.begin, 0);
  }
  return steps * (params.nheads / params.nheads_kv);
}

// workers: thread blocks or clusters that run at a time
template <typename Config>
BackwardSchedule make_schedule(const BackwardParams& params, int workers) {
  BackwardSchedule schedule{};
  schedule.group = params.nheads / params.nheads_kv;
  schedule.heads = params.nheads_kv;
  schedule.heads_of_kv = 1;
  schedule.head_blocks = 1;
  schedule.blocks = (params.seqlen_k + Config::kBlockN - 1) / Config::kBlockN;
  const int64_t heads = int64_t{params.batch} * params.nheads_kv, tiles = schedule.blocks * heads;
  if (tiles > INT_MAX) refuse_tiles(tiles);
  const BackwardPlan plan = plan_backward(params, Config::kBlockM, Config::kBlockN, workers,
                                          Config::kHeadDim, Config::kHeadDimV);
  schedule.splits = plan.splits;
  schedule.tiles = static_cast<int>(tiles);
  schedule.whole = plan.whole;
  schedule.tickets = schedule.count_tickets();
  schedule.section = plan.section;
  schedule.clear_tail_q = params.cu_seqlens_q != nullptr;
  schedule.clear_tail_k = params.cu_seqlens_k != nullptr || params.seqused_k != nullptr;
  schedule.lengths_on_device =
      schedule.clear_tail_q || schedule.clear_tail_k || params.leftpad_k != nullptr;
  const bool packed = params.cu_seqlens_k != nullptr;
  schedule.packed_tickets = packed;
  schedule.lone = Config::kWritesDq && params.seqlen_k <= Config::kBlockN;
  // Rotated tiles wait for each other, so those of a section must all be running, each on another
  // worker.
  const int parts = std::max(1, schedule.blocks * schedule.splits);  // of a head
  const int64_t together = workers / parts;                          // heads
  const int64_t least = packed ? params.nheads_kv : 1;
  schedule.rotated =
      params.deterministic && !schedule.lone && !is_masked(params) && together >= least;
  if (schedule.rotated) {
    schedule.section = static_cast<int>(std::min(heads, together)) * schedule.splits;
  }
  const bool has_idle_warps =
      Config::kHasIdleWarps && !schedule.lone && (packed || !schedule.lengths_on_device);
  if (has_idle_warps && takes_whole_heads(params, Config::kBlockM, Config::kBlockN, workers,
                                          Config::kHeadDim, Config::kHeadDimV)) {
    schedule.head_blocks = schedule.blocks;
    schedule.head_tiles = (params.seqlen_q + Config::kBlockM - 1) / Config::kBlockM *
                          (params.nheads / params.nheads_kv);
    schedule.splits = schedule.section = 1;
    schedule.whole = schedule.tickets = schedule.tiles;
    schedule.rotated = schedule.packed_tickets = false;
  } else if (plan.unequal.blocks > 0) {
    schedule.unequal = plan.unequal;
    schedule.blocks = plan.unequal.first[plan.unequal.blocks];
    schedule.whole = schedule.tickets = schedule.tiles = static_cast<int>(heads * schedule.blocks);
  } else if (has_idle_warps && !packed && !params.deterministic) {
    schedule.idle = plan_idle_work(params, plan, head_steps<Config>(params), Config::kBlockM,
                                   Config::kBlockN, workers);
  }
  schedule.last_section = schedule.section;
  schedule.complete();
  return schedule;
}

template <typename Config>
BackwardMaps make_maps(const BackwardParams& params) {
  using T = typename Config::T;
  const auto map = [&](const Operand& x, int headdim, bool packed, int total, int rows, int heads,
                       int block) {
    return encode_tensor_map<T, 3>(x.data, headdim,
                                   {{packed ? total : rows, x.row_stride, block},
                                    {heads, x.head_stride, 1},
                                    {packed ? 1 : params.batch, x.batch_stride, 1}});
  };
  const auto queries = [&](const Operand& x, int headdim) {
    return map(x, headdim, params.cu_seqlens_q != nullptr, params.total_q, params.seqlen_q,
               params.nheads, Config::kBlockM);
  };
  const auto keys = [&](const Operand& x, int headdim, int block) {
    return map(x, headdim, params.cu_seqlens_k != nullptr, params.total_k, params.seqlen_k,
               params.nheads_kv, block);
  };
  return {queries(params.q, params.headdim),
          keys(params.k, params.headdim, Config::kKeyRows),
          keys(params.v, params.headdim_v, Config::kKeyRows),
          queries(params.dout, params.headdim_v),
          keys(params.dk, params.headdim, kWarpRows),
          keys(params.dv, params.headdim_v, kWarpRows)};
}

template <typename Config>
constexpr auto main_kernel() {
  if constexpr (Config::kCluster > 1) {
    return wide_backward_kernel<Config>;
  } else {
    return backward_kernel<Config>;
  }
}

// Dynamic shared memory of a thread block. What comes last is idle warps': where they have no work,
// the L1 cache has it.
template <typename Config>
size_t shared_bytes(const BackwardSchedule& schedule) {
  using Storage = typename Config::SharedStorage;
  if constexpr (Config::kHasIdleWarps) {
    if (schedule.idle.head_steps == 0 && schedule.head_tiles == 0) {
      return sizeof(Storage) - sizeof(Storage::idle);
    }
  }
  return sizeof(Storage);
}

using BackwardLauncher = std::function<void(const BackwardParams&, cudaStream_t)>;

// Completes the parameters; returns what launches with the addresses of any tensors of this layout.
template <typename Config>
BackwardLauncher prepare_backward(BackwardParams& params, Workspaces& wanted) {
  constexpr auto kKernel = main_kernel<Config>();
  constexpr size_t kMostBytes = sizeof(typename Config::SharedStorage);
  static_assert(kMostBytes <= 227 * 1024);
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, kMostBytes, devices);

  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  params.row_tiles = row_tiles(params, Config::kBlockM);
  const int64_t tiles = int64_t{params.nheads} * params.row_tiles;
  wanted.add_kept_zero("counters", params.counters);
  wanted.add("row_statistics", params.row_statistics, tiles * 2 * Config::kBlockM);

  // Thread blocks stay: in deterministic mode one waits for others, which must be running.
  int workers = multiprocessors();
  if constexpr (Config::kCluster > 1) {
    static DeviceFacts clusters{};
    workers = clusters_of_device(reinterpret_cast<const void*>(kKernel), dim3(Config::kCluster),
                                 Config::kThreads, kMostBytes, clusters);
  }
  const BackwardSchedule schedule = make_schedule<Config>(params, workers);
  const size_t bytes = shared_bytes<Config>(schedule);
  const std::array copying{overlapping(), most_cache(sizeof(float) * tiles * Config::kDqSize)};
  if (schedule.head_tiles > 0) {
    const int64_t heads = schedule.tiles / schedule.head_blocks;
    wanted.add("dq_accum", params.dq_accum,
               std::min<int64_t>(heads, workers) * schedule.head_tiles * Config::kDqSize);
  } else if (!schedule.lone) {
    wanted.add("dq_accum", params.dq_accum, tiles * Config::kDqSize);
    if (params.deterministic) wanted.add("dq_turn", params.dq_turn, tiles * Config::kDqTurns);
  }
  if (schedule.idle.head_steps > 0) {
    wanted.add("dq_progress", params.dq_progress, DqProgress(params).size(tiles));
  }
  if (schedule.divided_tiles() > 0) {
    wanted.add(
        "partial_dkv", params.partial_dkv,
        schedule.places_of_parts() * Config::kBlockN * (Config::kHeadDim + Config::kHeadDimV));
  }
  const int64_t key_tiles = params.cu_seqlens_k == nullptr || schedule.head_tiles > 0
                                ? schedule.tickets / schedule.head_blocks
                                : SequenceTiles::of_keys(params, Config::kBlockN).count() *
                                      params.nheads_kv * schedule.splits;
  if (key_tiles > INT_MAX) refuse_tiles(key_tiles);
  const int grid = static_cast<int>(std::min<int64_t>(key_tiles, workers)) * Config::kCluster;
  const BackwardMaps prepared = make_maps<Config>(params);
  const float scale_log2 = scale_log2_of(params);
  const int few_end_blocks = kFewEndBlocks * multiprocessors();
  return [=](const BackwardParams& bound, cudaStream_t stream) {
    BackwardMaps maps = prepared;
    replace_address(maps.q, bound.q.data);
    replace_address(maps.k, bound.k.data);
    replace_address(maps.v, bound.v.data);
    replace_address(maps.dout, bound.dout.data);
    replace_address(maps.dk, bound.dk.data);
    replace_address(maps.dv, bound.dv.data);
    using Rows = RowsConfig<Config>;
    const SequenceTiles of_queries = SequenceTiles::of_queries(bound, Config::kBlockM).fewest();
    const int end_rows = static_cast<int>(of_queries.count()) * bound.nheads;
    const int row_blocks = end_rows * Rows::kParts;
    const int clearing = schedule.lengths_on_device ? std::min(row_blocks, kClearing) : 0;
    launch(copying, backward_rows_kernel<Config>, row_blocks, Rows::kThreads, 0, stream,
           "launch of the sm90 rows kernel", bound, of_queries, schedule.lengths_on_device,
           schedule.writes_dq(), clearing, schedule.idle.cleared);
    BackwardSchedule placed = schedule;
    if (schedule.rotated) {
      const int room = clusters_at_a_time(reinterpret_cast<const void*>(kKernel),
                                          dim3(Config::kCluster), Config::kThreads, bytes, stream);
      placed.rotated = Config::kCluster * room >= grid;
    }
    launch(std::array{placed.rotated ? together() : overlapping()}, kKernel, grid, Config::kThreads,
           bytes, stream, "launch of the sm90 backward kernel", bound, maps, placed, scale_log2);
    using End = EndConfig<Config>;
    const int part_blocks = End::kBlocks * schedule.divided_tiles();
    const int end_blocks = part_blocks + (schedule.writes_dq() ? 0 : end_rows);
    if (end_blocks == 0) return;
    const auto launch_end = [&](auto attributes, auto kernel, size_t shared_memory) {
      launch(attributes, kernel, end_blocks, End::kThreads, shared_memory, stream,
             "launch of the sm90 end kernel", bound, schedule, of_queries, part_blocks);
    };
    if (part_blocks == 0) {
      launch_end(copying, backward_end_kernel<Config, false>, 0);
    } else if (end_blocks > few_end_blocks) {
      launch_end(copying, backward_end_kernel<Config, true>, 0);
    } else {
      static std::atomic<uint64_t> devices{0};
      allow_shared_memory(backward_end_kernel<Config, true>, kHalfSharedMemory, devices);
      launch_end(std::array{overlapping()}, backward_end_kernel<Config, true>, kHalfSharedMemory);
    }
  };
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct BackwardRow {
  using Config =
      std::conditional_t<(kHeadDim > 128), WideBackwardConfig<T, kHeadDim, kHeadDimV, kFeatures>,
                         BackwardConfig<T, kHeadDim, kHeadDimV, kFeatures>>;
  static_assert(std::is_same_v<T, KV> && std::is_same_v<T, Out>);
  using Params = BackwardParams;
  static constexpr uint32_t kTakes = features_of(kFeatures);
  static constexpr bool kHasLongSteps =
      kFeatures == FeatureSet::kPlain && kHeadDim == LongBackwardConfig<T>::kHeadDim;
  static constexpr int kTiles = kHasLongSteps ? 2 : 1;

  static BackwardLauncher prepare(Params& params, Workspaces& wanted) {
    if constexpr (kHasLongSteps) {
      if (takes_long_steps(params)) return prepare_backward<LongBackwardConfig<T>>(params, wanted);
    }
    return prepare_backward<Config>(params, wanted);
  }
};

}  // namespace flash::sm90
