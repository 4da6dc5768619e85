// Attention of a few queries to many keys (decoding), at the speed of memory: FlashDecoding (Dao et
// al. 2023), with the query heads of a group in one tile.
//
// A tile is 16 or 32 rows: pairs of a query and a head of the group that reads the same keys. Its
// keys are divided into parts, one for each of several thread blocks, and within a part among the
// warps, block by block. Each warp loads its own keys and has its own softmax and output, so that
// no warp waits for another in the main loop. The warps merge in shared memory. So do, on Hopper,
// the parts that are a cluster of thread blocks: each thread block merges a slice of the result.
// More parts merge in a workspace: the last to arrive reads all of them, always in the same order.
//
// Only keys between the first and the last that some row of the tile sees are read, and rows past
// the end are zero when loaded. So NaN outside the sequence or before its window never reaches a
// result; of keys that the mask hides from some of the rows the same is said as in
// sm80/forward_kernel.cuh.
#pragma once

#include "common/e4m3.h"
#include "common/fragment.h"
#include "common/gaps.h"
#include "common/mask.h"
#include "common/merge.h"
#include "common/parts.h"
#include "common/range.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/shared_address.h"
#include "common/softmax.h"
#include "common/tile_layout.h"
#include "common/warp.h"
#include "common/warp_matmul.h"
#include "decode/decode_config.cuh"
#include "decode/e4m3_matmul.h"
#include "decode/key_loader.cuh"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/cp_async.h"
#include "ptx/griddepcontrol.h"
#include "ptx/special_functions.h"

namespace flash::decode {

// What the host decides about a launch.
struct DecodeSchedule {
  int splits;                  // parts of a tile's keys at most
  int cluster;                 // thread blocks of a cluster, or 1: parts that are neighbours
  int clusters;                // of a tile
  unsigned splits_reciprocal;  // x / splits = x * this >> 32
  int group;                   // query heads that read the same keys
  int row_tiles;               // of a key head
  int rows;                    // of a tile at most
  int page_shift;              // log2 of the page size, or -1
  int first_batch;             // of the launch
};

// Whether the kernel starts while an append is running, whose predecessors have ended.
template <typename Config>
__device__ bool follows_append(const ForwardParams& params) {
  return Config::kHopper && params.seqlen_new > 0;
}

// The rows of one tile of a sequence.
struct TileRows {
  int first, rows;  // of the pairs of a query and a head, heads fastest
  int group, head_kv;

  __device__ int query_of(int row) const { return static_cast<unsigned>(first + row) / group; }
  __device__ int head_of(int row) const {
    return head_kv * group + static_cast<unsigned>(first + row) % group;
  }
};

// Starts the copy of the tile's queries, by all threads. Rows that hold no query become zero.
// q: shared address
template <typename Config>
__device__ void load_queries(const ForwardParams& params, const Sequence& sequence,
                             const TileRows& tile, uint32_t q) {
  using T = typename Config::T;
  using Layout = TileLayout<Config::kHeadDim>;
  for (int i = threadIdx.x; i < Config::kRows * Layout::kChunks; i += Config::kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const T* const source = rows_of<const T>(
        params.q, sequence.q_batch, sequence.q_first + tile.query_of(row), tile.head_of(row));
    ptx::cp_async_16_zfill(q + Layout::offset(row, chunk), source + chunk * 8,
                           row < tile.rows && chunk * 8 < params.headdim);
  }
}

// Leaves the warps' softmax and output in shared memory. The ring is not in use any more.
template <typename Config>
__device__ void leave_warps(typename Config::SharedStorage& shared, const TileRows& tile,
                            SoftmaxState<Config::kRowTiles>& softmax,
                            const float (&out)[Config::kRowTiles][Config::kHeadDimV / 8][4],
                            int warp, int lane) {
  WarpTeam().sum(softmax.sum);
  __syncthreads();  // every warp is done with its ring
#pragma unroll
  for (int r = 0; r < 2 * Config::kRowTiles; ++r) {
    const int row = r * 8 + lane / 4;
    if (r * 8 >= tile.rows) break;
    if (lane % 4 == 0) {
      shared.rows[warp][row] = make_float2(softmax.reference[r], softmax.sum[r]);
    }
    if constexpr (Config::kIsE4m3) {
      auto* const target = shared.out[warp][row] + lane % 4;
#pragma unroll
      for (int n = 0; n < Config::kHeadDimV / 8; n += 2) {
        target[n * 2] = columns_of(out[r / 2][n], out[r / 2][n + 1], r % 2);
      }
    } else {
      leave_row(shared.out[warp][row], out[r / 2], r % 2, lane);
    }
  }
  __syncthreads();
}

// Calls function(row, four) for groups of four columns of the tile's rows, by all threads: for each
// of so many thread blocks another slice of the rows.
template <typename Config, typename Function>
__device__ void for_each_four(const TileRows& tile, int slice, int slices, Function function) {
  constexpr int kFours = Config::kHeadDimV / 4;
  for (int i = threadIdx.x;; i += Config::kThreads) {
    const int row = slice + i / kFours * slices;
    if (row >= tile.rows) return;
    function(row, i % kFours);
  }
}

// One part of the keys of one tile.
template <typename Config>
__device__ void attend(const ForwardParams& params, const DecodeSchedule& schedule, int batch,
                       float scale_log2, typename Config::SharedStorage& shared, int warp,
                       int lane) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kRowTiles = Config::kRowTiles, kRows = Config::kRows;
  constexpr int kBlockN = Config::kBlockN, kColTiles = kBlockN / 8;
  constexpr int kStepKeys = Config::kStepKeys, kSlots = Config::kSlots;

  // Indices. What needs no division needs none: the first load waits for all of this.
  const int part = blockIdx.y;
  const int cluster = Config::kHopper ? schedule.cluster : 1, rank = part & (cluster - 1);
  int head_kv = blockIdx.x, row_tile = 0;
  if (schedule.row_tiles > 1) {
    head_kv = blockIdx.x / schedule.row_tiles;
    row_tile = blockIdx.x - head_kv * schedule.row_tiles;
  }
  const Sequence sequence(params, batch, params.seqlen_new);
  const int first_row = row_tile * kRows, all_rows = sequence.seqlen_q * schedule.group;
  const TileRows tile{first_row, min(kRows, all_rows - first_row), schedule.group, head_kv};
  if (tile.rows <= 0) return;
  const int first_query = first_row == 0 ? 0 : tile.query_of(0);
  const int end_query =
      first_row + tile.rows == all_rows ? sequence.seqlen_q : tile.query_of(tile.rows - 1) + 1;

  // Keys of the tile, of which each part has as many steps; of this part; of this warp.
  Mask mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
            params.window_right};
  const Range visible{mask.first_key(first_query), mask.end_key(end_query - 1)};
  mask.seqlen_k = visible.end;  // rows from there on are not loaded
  const int steps = visible.empty() ? 0 : (visible.end - visible.begin + kStepKeys - 1) / kStepKeys;
  const int part_steps = schedule.splits == 1
                             ? steps
                             : __umulhi(steps + schedule.splits - 1, schedule.splits_reciprocal);
  // Without keys, but for those that a cluster waits for; one part alone merges with none.
  if (part > 0 && (part_steps >= steps || (part - rank) * part_steps >= steps)) return;
  const int part_begin = visible.begin + part * part_steps * kStepKeys;
  const int part_end = min(visible.end, part_begin + part_steps * kStepKeys);
  const int warp_begin = part_begin + warp * kBlockN;

  // Loads. The queries come with the first values, or from the append before. Rows that are older
  // than that are read while it runs.
  const uint32_t q = shared_address(shared.q), ring = shared_address(shared.ring[warp]);
  const auto slot_at = [ring](int i) { return ring + i * Config::kSlotBytes; };
  KeyLoader<Config> loader(params, sequence, batch, head_kv, schedule.page_shift, warp_begin,
                           part_end, lane);
  const auto load_block = [&](int i) {
    loader.template load<false>(slot_at(i));
    if (i + 1 < kSlots) loader.template load<true>(slot_at(i + 1));
  };
  if (follows_append<Config>(params)) {
    const int old_keys = sequence.seqlen_k - params.seqlen_new;
#pragma unroll 1
    for (int i = 0; i < kSlots; i += 2) {
      const int end_key = warp_begin + i / 2 * kStepKeys + kBlockN;
      if (end_key > old_keys) ptx::wait_for_earlier_kernels();
      load_block(i);
    }
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
    load_queries<Config>(params, sequence, tile, q);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  } else {
    loader.template load<false>(slot_at(0));
    load_queries<Config>(params, sequence, tile, q);
    loader.template load<true>(slot_at(1));
#pragma unroll 1
    for (int i = 2; i < kSlots; i += 2) load_block(i);
  }

  // What Q K^T and P V are to be multiplied by. A scale is positive: queries have the sign.
  float key_unit = 1.f, value_unit = 1.f;
  uint32_t signs = 0;
  if constexpr (Config::kIsE4m3) {
    const float k_descale = descale_of(params.k_descale, batch, head_kv);
    if (k_descale < 0.f) signs = 0x80008000;
    key_unit = kE4m3Unit * fabsf(k_descale);
    value_unit = kE4m3Unit * descale_of(params.v_descale, batch, head_kv);
    scale_log2 = scale_log2_of(params, key_unit) + 0.f * key_unit;  // NaN stays
  }

  // Rows that the lane holds some elements of: row r * 8 + lane / 4.
  int queries[2 * kRowTiles];
  float sinks[2 * kRowTiles], slopes[2 * kRowTiles];
  ScoreTransform transform(params, batch, 0, mask.shift, key_unit);
  transform.slope = 0.f;  // heads differ: ALiBi is applied here
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const int row = r * 8 + lane / 4, head = tile.head_of(row);
    queries[r] = tile.query_of(row);
    const bool has_sink = params.s_aux != nullptr && part == 0 && warp == 0;
    sinks[r] = has_sink ? params.s_aux[head] : -INFINITY;
    if constexpr (kFull) {
      slopes[r] = ScoreTransform(params, batch, head, mask.shift, key_unit).slope;
    }
  }
  float out[kRowTiles][kHeadDimV / 8][4] = {};
  SoftmaxState<kRowTiles> softmax(scale_log2, sinks, lane % 4 == 0);

  ptx::cp_async_wait<kSlots - 2>();
  __syncthreads();  // the queries have arrived
  if constexpr (Config::kIsE4m3) {
    order_queries<Config::kThreads, kRows, kHeadDim>(reinterpret_cast<unsigned char*>(shared.q),
                                                     signs);
    __syncthreads();  // they are in order
  }
  int slot = 0;
  const auto next_slot = [&slot] { slot = slot + 1 == kSlots ? 0 : slot + 1; };
#pragma unroll 1
  for (int key = warp_begin; key < part_end; key += kStepKeys) {
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // K has arrived
    float scores[kRowTiles][kColTiles][4];
    if constexpr (Config::kIsE4m3) {
      compute_e4m3_scores<T, kHeadDim>(scores, q, slot_at(slot), lane);
    } else {
      compute_scores<T, kHeadDim>(scores, q, slot_at(slot), lane);
    }
    __syncwarp();  // all lanes are done with the slot
    loader.template load<kSlots % 2 == 1>(slot_at(slot));
    next_slot();

    const int col = key + lane % 4 * 2;
    const auto mask_scores = [&] {
      if (!mask.cuts(first_query, end_query - first_query, key, kBlockN)) return;
      apply_mask(scores, mask, [&](int m, int half) { return queries[2 * m + half]; }, col);
    };
    if constexpr (kFull) {
      transform.apply(scores, 0, col, mask_scores, [](int, int, int, float) {});
      if (params.alibi_slopes != nullptr) {
        for_each(scores, [&](float& score, int m, int n, int j) {
          const int r = 2 * m + j / 2, distance = col + n * 8 + j % 2 - queries[r] - mask.shift;
          score -= slopes[r] * fabsf(static_cast<float>(distance));
        });
      }
    }
    mask_scores();
    float factors[2 * kRowTiles];
    if (follow_maxima(softmax, scores, factors, WarpTeam())) rescale_output(out, factors);

    // P = exp(S): as in the sm80 forward, accumulators become A operands where they are.
    uint32_t p[kColTiles / 2][kRowTiles][4];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 2 * half;
          p[n / 2][m][n % 2 * 2 + half] =
              pack(softmax.exponentiate(scores[m][n][j], m, j),
                   softmax.exponentiate(scores[m][n][j + 1], m, j + 1), typename Config::P());
        }
      }
    }
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // V has arrived
    const uint32_t values = slot_at(slot) + Config::ValueLayout::by_columns(lane);
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      if constexpr (Config::kIsE4m3) {
        multiply_by_e4m3_values<kHeadDimV>(out, p[n], values, n);
      } else {
        multiply_by_values<T, kHeadDimV, 1>(out, p[n], values, n);
      }
    }
    __syncwarp();  // all lanes are done with the slot
    loader.template load<kSlots % 2 == 0>(slot_at(slot));
    next_slot();
  }

  // Epilogue. The warps merge, then the thread blocks of a cluster, then clusters.
  constexpr int kFours = kHeadDimV / 4;
  leave_warps<Config>(shared, tile, softmax, out, warp, lane);
  const auto of_warps = [&](int row, int four) {
    return merge<kWarps>(
        kWarps, [&](int i) { return shared.rows[i][row]; },
        [&](int i) { return shared.out[i][row][four]; });
  };
  const auto store = [&](int row, int four, const Merged& x) {
    store_merged<T>(params, sequence, tile.query_of(row), tile.head_of(row), four * 4, x,
                    value_unit);
  };
  if (part_steps >= steps) {  // there is one part
    for_each_four<Config>(tile, 0, 1,
                          [&](int row, int four) { store(row, four, of_warps(row, four)); });
    return;
  }
  const int parts_used = (steps + part_steps - 1) / part_steps;  // the others have no keys
  const int clusters_used = (parts_used + cluster - 1) / cluster;
  const int ranks_used = min(cluster, parts_used - (part - rank));
  if constexpr (Config::kHopper) {
    for_each_four<Config>(tile, 0, 1, [&](int row, int four) {
      const Merged x = of_warps(row, four);
      shared.out[0][row][four] = x.out;
      if (four == 0) shared.merged[row] = make_float2(x.reference, x.sum);
    });
    ptx::cluster_sync();
  }
  const auto of_cluster = [&](int row, int four) {
    if constexpr (Config::kHopper) {
      return merge<8>(
          ranks_used, [&](int i) { return *ptx::map_to_rank(&shared.merged[row], i); },
          [&](int i) { return *ptx::map_to_rank(&shared.out[0][row][four], i); });
    } else {
      return of_warps(row, four);
    }
  };
  const int place = blockIdx.z * gridDim.x + blockIdx.x;
  const int64_t first_stored = int64_t{1} * place * schedule.clusters * schedule.rows;
  const auto stored_rows = reinterpret_cast<float2*>(params.partial_rows) + first_stored;
  const auto stored_out = reinterpret_cast<float4*>(params.partial_out) + first_stored * kFours;
  for_each_four<Config>(tile, rank, cluster, [&](int row, int four) {
    const Merged x = of_cluster(row, four);
    if (clusters_used == 1) return store(row, four, x);
    const int stored = part / cluster * schedule.rows + row;
    if (four == 0) __stcg(stored_rows + stored, make_float2(x.reference, x.sum));
    __stcg(stored_out + stored * kFours + four, x.out);
  });
  if constexpr (Config::kHopper) ptx::cluster_arrive();
  if (clusters_used > 1 && is_last_block(params.counters + place * cluster + rank, clusters_used)) {
    for_each_four<Config>(tile, rank, cluster, [&](int row, int four) {
      const auto stored = [&](int i) { return i * schedule.rows + row; };
      store(row, four,
            merge<8>(
                clusters_used, [&](int i) { return __ldcg(stored_rows + stored(i)); },
                [&](int i) { return __ldcg(stored_out + stored(i) * kFours + four); }));
    });
  }
  if constexpr (Config::kHopper) ptx::cluster_wait();  // others have read this shared memory
}

// Grid: (nheads_kv * row_tiles, parts, sequences of the launch), in clusters of parts: see
// prepare_kernel. params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ DecodeSchedule schedule, float scale_log2) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (Config::kHopper && !follows_append<Config>(params)) ptx::let_next_kernel_start();
  attend<Config>(params, schedule, schedule.first_batch + blockIdx.z, scale_log2, shared, warp,
                 lane);
  if (params.cu_seqlens_q != nullptr && blockIdx.y == 0) {
    clear_gaps<typename Config::T>(params, (blockIdx.z * gridDim.x + blockIdx.x) * kWarps + warp,
                                   gridDim.z * gridDim.x * kWarps, lane);
  }
}

}  // namespace flash::decode
