// Attention of a few queries to many keys (decoding), at the speed of memory: FlashDecoding (Dao et
// al. 2023), with the query heads of a group in one tile.
//
// A tile is 16, 32 or 64 rows: pairs of a query and a head of the group that reads the same keys.
// Its keys are divided into parts, one for each of several thread blocks. Warps that have keys of
// their own merge in shared memory. So do, on Hopper, the parts that are a cluster of thread
// blocks: each thread block is sent a slice of all results and merges it. More parts merge in a
// workspace: the last to arrive reads all of them, always in the same order.
//
// Keys before the first that some row of the tile sees are not read. Rows past the last are zero
// when loaded, or in a part's first step, which may be read before the length is known, keys are
// masked and values zeroed. So NaN outside the sequence or before its window never reaches a
// result; of keys that the mask hides from some of the rows the same is said as in
// sm80/forward_kernel.cuh.
#pragma once

#include "common/gaps.h"
#include "common/merge.h"
#include "common/parts.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/warp.h"
#include "decode/decode_by_warpgroups.cuh"
#include "decode/decode_by_warps.cuh"
#include "decode/decode_config.cuh"
#include "decode/decode_part.cuh"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/griddepcontrol.h"
#include "ptx/setmaxnreg.h"

namespace flash::decode {

// Calls function(row, four) for groups of four columns of so many rows, by all threads: for each
// of so many thread blocks another slice of the rows.
template <typename Config, typename Function>
__device__ void for_each_four(int rows, int slice, int slices, Function function) {
  constexpr int kFours = Config::kHeadDimV / 4;
  for (int i = threadIdx.x;; i += Config::kThreads) {
    const int row = slice + i / kFours * slices;
    if (row >= rows) return;
    function(row, i % kFours);
  }
}

// One part of one tile, and its merge with the others.
template <typename Config>
__device__ void attend(const ForwardParams& params, const DecodeSchedule& schedule, int batch,
                       float scale_log2, typename Config::SharedStorage& shared, int warp,
                       int lane) {
  using T = typename Config::T;
  constexpr int kStepKeys = Config::kStepKeys;

  // Indices. What needs no division needs none: the first load waits for this.
  const int part = blockIdx.y;
  const int cluster = Config::kHopper ? schedule.cluster : 1;
  const int rank = Config::kHopper ? ptx::cluster_rank() : 0;
  int head_kv = blockIdx.x, row_tile = 0;
  if (schedule.row_tiles.value > 1) {
    head_kv = schedule.row_tiles.quotient(blockIdx.x);
    row_tile = blockIdx.x - head_kv * schedule.row_tiles.value;
  }
  if constexpr (Config::kHopper) {
    if (threadIdx.x == 0) {
      sm90::init_barrier(shared.received_full, 1);
      sm90::fence_barrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  Sequence sequence = Sequence::whole(params, batch);
  const int first_row = row_tile * Config::kRows;
  const int all_rows = sequence.seqlen_q * schedule.group.value;
  const TileRows tile{first_row, min(Config::kRows, all_rows - first_row), schedule.group, head_kv};
  if (tile.rows <= 0) return;
  const int first_query = first_row == 0 ? 0 : tile.query_of(0);
  const int end_query =
      first_row + tile.rows == all_rows ? sequence.seqlen_q : tile.query_of(tile.rows - 1) + 1;

  // The first loads. Where a length does not decide which keys they are of, they do not wait for
  // it: rows behind the last key are in the cache too. Nor do the first keys of warpgroups wait for
  // the barriers.
  const int stride = schedule.splits * kStepKeys;
  KeyLoader<Config> loader(params, batch, head_kv, schedule.page_size, stride, lane,
                           shared.pages[warp % kWarps]);
  const bool follows = follows_append<Config>(params);
  const bool is_loader = !Config::kWarpgroup || warp < kWarps;
  const auto start = [&](int begin, int end) {
    if (!is_loader) return;
    loader.start(sequence, begin + part * kStepKeys + warp * Config::kBlockN, end);
    if (follows) return;
    if constexpr (Config::kWarpgroup) {
      loader.template load<false>(shared_address(shared.ring));
    } else {
      start_by_warps<Config>(params, sequence, tile, loader, shared, warp);
    }
  };
  const auto start_more = [&] {
    if constexpr (Config::kWarpgroup) {
      if (is_loader && !follows) start_values<Config>(loader, shared);
    }
  };
  if (schedule.starts_early) start(0, sequence.seqlen_k);
  if constexpr (Config::kWarpgroup) {
    if (warp == kWarps && lane == 0) init_barriers<Config>(shared);
    __syncthreads();  // the barriers are initialised
    if (!is_loader && !follows) start_queries<Config>(params, sequence, tile, shared);
  }
  if (schedule.starts_early) start_more();
  sequence.take_rows_in_use(params, batch, params.seqlen_new);

  // Keys of the tile, of which each part has a step in turn.
  Mask mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
            params.window_right};
  const Range visible{mask.first_key(first_query), mask.end_key(end_query - 1)};
  mask.seqlen_k = visible.end;  // rows from there on are not loaded
  const int steps = visible.empty() ? 0 : (visible.end - visible.begin + kStepKeys - 1) / kStepKeys;
  const int parts_used = min(steps, schedule.splits);  // the others have no keys
  const bool has_keys = part < parts_used;
  if constexpr (Config::kWarpgroup) {
    if (!has_keys && !follows) finish_start<Config>(shared, schedule.starts_early);
  }
  // A cluster waits for all of its parts; one part alone merges with none.
  if (part > 0 && (parts_used <= 1 || part - rank >= parts_used)) {
    if constexpr (!Config::kWarpgroup) {
      if (schedule.starts_early) ptx::cp_async_wait_all();
    }
    return;
  }
  if (schedule.starts_early) {
    loader.end_at(visible.end);
  } else if (has_keys || !Config::kWarpgroup) {
    start(visible.begin, visible.end);
    start_more();
  }
  const int begin = has_keys ? visible.begin + part * kStepKeys : visible.end;
  const Part keys{sequence, tile, mask, batch, first_query, end_query, begin, visible.end, stride};
  if constexpr (!Config::kWarpgroup) {
    attend_by_warps<Config>(params, schedule, keys, part == 0, scale_log2, loader, shared, warp,
                            lane);
  } else if (is_loader) {
    if constexpr (Config::kGivesRegisters) ptx::setmaxnreg_dec<Config::kRegistersToLoad>();
    if (has_keys) load_part<Config>(params, schedule, keys, loader, shared, warp);
    finish_ring<Config>();
    if constexpr (Config::kGivesRegisters) ptx::setmaxnreg_inc<Config::kRegisters>();
  } else {
    if constexpr (Config::kGivesRegisters) ptx::setmaxnreg_inc<Config::kRegistersToMultiply>();
    multiply_part<Config>(params, keys, part == 0, scale_log2, shared, warp / kWarps - 1,
                          warp % kWarps, lane);
    if constexpr (Config::kGivesRegisters) ptx::setmaxnreg_dec<Config::kRegisters>();
  }
  __syncthreads();         // results are there
  float value_unit = 1.f;  // what P V is to be multiplied by
  if constexpr (Config::kIsE4m3) {
    value_unit = kE4m3Unit * descale_of(params.v_descale, batch, head_kv);
  }

  // Epilogue. The warps merge, then the thread blocks of a cluster, then clusters.
  constexpr int kFours = Config::kFours;
  const auto statistics = [](const float4& x) { return make_float2(x.x, x.y); };
  const auto of_warps = [&](int row, int four) {
    return merge<Config::kResults>(
        Config::kResults, [&](int i) { return statistics(shared.out[i][row][kFours]); },
        [&](int i) { return shared.out[i][row][four]; });
  };
  const auto store = [&](int row, int four, const Merged& x) {
    store_merged<T>(params, sequence, tile.query_of(row), tile.head_of(row), four * 4, x,
                    value_unit);
  };
  if (parts_used <= 1) {
    for_each_four<Config>(tile.rows, 0, 1,
                          [&](int row, int four) { store(row, four, of_warps(row, four)); });
    return;
  }
  const int clusters_used = (parts_used + cluster - 1) / cluster;
  const int ranks_used = min(cluster, parts_used - (part - rank));
  const auto over_cluster = [&](int x) { return x * schedule.cluster_reciprocal >> 16; };
  if constexpr (Config::kHopper) {
    ptx::cluster_wait();  // the others' barriers are initialised
    // Ranks without keys send nothing.
    const int rows_sent = rank < ranks_used ? tile.rows : 0;
    for_each_four<Config>(rows_sent, 0, 1, [&](int row, int four) {
      const Merged x = of_warps(row, four);
      const int row_of_slice = over_cluster(row), owner = row - row_of_slice * cluster;
      float4* const target =
          ptx::map_to_rank(shared.received[rank * schedule.slice_rows + row_of_slice], owner);
      uint64_t* const full = ptx::map_to_rank(&shared.received_full, owner);
      ptx::store_in_cluster(target + four, x.out, full);
      if (four == 0) {
        ptx::store_in_cluster(target + kFours, make_float4(x.reference, x.sum, 0.f, 0.f), full);
      }
    });
    const int rows = over_cluster(max(tile.rows - rank, 0) + cluster - 1);
    if (rows == 0) return;
    if (threadIdx.x == 0) {
      sm90::arrive_expecting(shared.received_full, ranks_used * rows * (kFours + 1) * 16);
    }
    sm90::wait(shared.received_full, 0);
  }
  const auto of_cluster = [&](int row, int four) {
    if constexpr (Config::kHopper) {
      const auto received = [&](int i) -> const auto& {
        return shared.received[i * schedule.slice_rows + over_cluster(row)];
      };
      return merge<4>(
          ranks_used, [&](int i) { return statistics(received(i)[kFours]); },
          [&](int i) { return received(i)[four]; });
    } else {
      return of_warps(row, four);
    }
  };
  const int cluster_of_tile = (part - rank) / cluster;
  const int place = blockIdx.z * gridDim.x + blockIdx.x;
  const int64_t first_stored = int64_t{1} * place * schedule.clusters * schedule.rows;
  const auto stored_rows = reinterpret_cast<float2*>(params.partial_rows) + first_stored;
  const auto stored_out = reinterpret_cast<float4*>(params.partial_out) + first_stored * kFours;
  for_each_four<Config>(tile.rows, rank, cluster, [&](int row, int four) {
    const Merged x = of_cluster(row, four);
    if (clusters_used == 1) return store(row, four, x);
    const int stored = cluster_of_tile * schedule.rows + row;
    if (four == 0) __stcg(stored_rows + stored, make_float2(x.reference, x.sum));
    __stcg(stored_out + stored * kFours + four, x.out);
  });
  if (clusters_used > 1 && is_last_block(params.counters + place * cluster + rank, clusters_used)) {
    for_each_four<Config>(tile.rows, rank, cluster, [&](int row, int four) {
      const auto stored = [&](int i) { return i * schedule.rows + row; };
      store(row, four,
            merge<8>(
                clusters_used, [&](int i) { return __ldcg(stored_rows + stored(i)); },
                [&](int i) { return __ldcg(stored_out + stored(i) * kFours + four); }));
    });
  }
}

// Grid: (nheads_kv * row_tiles, parts, sequences of the launch), in clusters of parts: see
// prepare_kernel. params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ DecodeSchedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (Config::kHopper && !follows_append<Config>(params)) ptx::let_next_kernel_start();
  attend<Config>(params, schedule, schedule.first_batch + blockIdx.z, scale_log2, shared, warp,
                 lane);
  if (params.cu_seqlens_q != nullptr && blockIdx.y == 0) {
    constexpr int kAllWarps = Config::kThreads / 32;
    clear_gaps<typename Config::T>(params, (blockIdx.z * gridDim.x + blockIdx.x) * kAllWarps + warp,
                                   gridDim.z * gridDim.x * kAllWarps, lane);
  }
}

}  // namespace flash::decode
