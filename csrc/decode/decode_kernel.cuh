// Attention of a few queries to many keys (decoding), at the speed of memory: FlashDecoding (Dao et
// al. 2023), with the query heads of a group in one tile.
//
// A tile is 16 or 32 rows: pairs of a query and a head of the group that reads the same keys. Its
// keys are divided into parts, one for each of several thread blocks, and within a part among the
// warps, block by block. Each warp loads its own keys and has its own softmax and output, so that
// no warp waits for another in the main loop. The warps merge in shared memory, the parts in a
// workspace: the last thread block to arrive reads all of them, in the order of the keys.
//
// Only keys between the first and the last that some row of the tile sees are read, and rows past
// the end are zero when loaded. So NaN outside the sequence or before its window never reaches a
// result; of keys that the mask hides from some of the rows the same is said as in
// sm80/forward_kernel.cuh.
#pragma once

#include <cfloat>

#include "common/fragment.h"
#include "common/gaps.h"
#include "common/mask.h"
#include "common/pack.h"
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
#include "decode/key_loader.cuh"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/griddepcontrol.h"
#include "ptx/special_functions.h"

namespace flash::decode {

// What the host decides about a launch.
struct DecodeSchedule {
  int splits;                  // parts of a tile's keys at most
  unsigned splits_reciprocal;  // x / splits = x * this >> 32
  int group;                   // query heads that read the same keys
  int row_tiles;               // of a key head
  int rows;                    // of a tile at most
  int page_shift;              // log2 of the page size, or -1
  int first_batch;             // of the launch
};

// The rows of one tile of a sequence.
struct TileRows {
  int first, rows;  // of the pairs of a query and a head, heads fastest
  int group, head_kv;

  __device__ int query_of(int row) const { return static_cast<unsigned>(first + row) / group; }
  __device__ int head_of(int row) const {
    return head_kv * group + static_cast<unsigned>(first + row) % group;
  }
};

// What a tile's parts leave for the one that merges them.
struct TileParts {
  float4* out;   // (splits, rows, kHeadDimV / 4), relative to the references
  float2* rows;  // (splits, rows): references and sums
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

// Writes four columns of a row: what the warps or parts have in sum, relative to `reference`.
template <typename Config>
__device__ void store_result(const ForwardParams& params, const Sequence& sequence,
                             const TileRows& tile, int row, int col, const float4& x,
                             float reference, float sum) {
  using T = typename Config::T;
  const int head = tile.head_of(row), place = sequence.q_first + tile.query_of(row);
  const RowEnd end = end_of_row(reference, sum, 1.f);
  if (col == 0) {
    params.lse[sequence.q_batch * params.lse_batch_stride + head * params.lse_head_stride + place] =
        end.lse;
  }
  if (col >= params.headdim_v) return;
  *reinterpret_cast<uint2*>(rows_of<T>(params.out, sequence.q_batch, place, head) + col) =
      make_uint2(pack(x.x * end.factor, x.y * end.factor, T()),
                 pack(x.z * end.factor, x.w * end.factor, T()));
}

__device__ inline void add_scaled(float4& x, float factor, const float4& y) {
  x.x += factor * y.x, x.y += factor * y.y, x.z += factor * y.z, x.w += factor * y.w;
}

// Calls function(row, col) for all groups of four columns of the tile's rows, by all threads.
template <typename Config, typename Function>
__device__ void for_each_four(const TileRows& tile, Function function) {
  constexpr int kFours = Config::kHeadDimV / 4;
  for (int i = threadIdx.x; i < tile.rows * kFours; i += Config::kThreads) {
    function(i / kFours, i % kFours * 4);
  }
}

// Leaves the warps' softmax and output in shared memory, and merges them: function(row, col, x,
// reference, sum) is called for each four columns of each row. The ring is not in use any more.
template <typename Config, typename Function>
__device__ void merge_warps(typename Config::SharedStorage& shared, const TileRows& tile,
                            SoftmaxState<Config::kRowTiles>& softmax,
                            const float (&out)[Config::kRowTiles][Config::kHeadDimV / 8][4],
                            int warp, int lane, Function function) {
  WarpTeam().sum(softmax.sum);
  __syncthreads();  // every warp is done with its ring
#pragma unroll
  for (int r = 0; r < 2 * Config::kRowTiles; ++r) {
    const int row = r * 8 + lane / 4;
    if (r * 8 >= tile.rows) break;
    if (lane % 4 == 0) {
      shared.references[warp][row] = softmax.reference[r];
      shared.sums[warp][row] = softmax.sum[r];
    }
    auto* const target = reinterpret_cast<float2*>(shared.out[warp][row]) + lane % 4;
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float* const pair = &out[r / 2][n][r % 2 * 2];
      target[n * 4] = make_float2(pair[0], pair[1]);
    }
  }
  __syncthreads();
  for_each_four<Config>(tile, [&](int row, int col) {
    float reference = -FLT_MAX, sum = 0.f;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) reference = fmaxf(reference, shared.references[w][row]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = ptx::ex2(shared.references[w][row] - reference);
      sum += factor * shared.sums[w][row];
      add_scaled(x, factor, shared.out[w][row][col / 4]);
    }
    function(row, col, x, reference, sum);
  });
}

// Merges the parts of a tile, in their order, and writes the result.
template <typename Config>
__device__ void merge_parts(const ForwardParams& params, const Sequence& sequence,
                            const TileRows& tile, const TileParts& parts, int count,
                            int stored_rows, typename Config::SharedStorage& shared, int warp,
                            int lane) {
  for (int row = warp; row < tile.rows; row += kWarps) {
    float reference = -FLT_MAX, sum = 0.f;
    for (int part = lane; part < count; part += 32) {
      shared.parts[row][part] = __ldcg(parts.rows + part * stored_rows + row);
      reference = fmaxf(reference, shared.parts[row][part].x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(0xffffffff, reference, step));
    }
    for (int part = lane; part < count; part += 32) {
      float2& x = shared.parts[row][part];
      x.x = ptx::ex2(x.x - reference);
      sum += x.x * x.y;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0) shared.references[0][row] = reference, shared.sums[0][row] = sum;
  }
  __syncthreads();
  for_each_four<Config>(tile, [&](int row, int col) {
    constexpr int kFours = Config::kHeadDimV / 4;
    const float4* const source = parts.out + row * kFours + col / 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int part = 0; part < count; ++part) {
      add_scaled(x, shared.parts[row][part].x, __ldcg(source + part * stored_rows * kFours));
    }
    store_result<Config>(params, sequence, tile, row, col, x, shared.references[0][row],
                         shared.sums[0][row]);
  });
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
  int head_kv = blockIdx.x, row_tile = 0;
  if (schedule.row_tiles > 1) {
    head_kv = blockIdx.x / schedule.row_tiles;
    row_tile = blockIdx.x - head_kv * schedule.row_tiles;
  }
  const Sequence sequence(params, batch);
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
  if (part > 0 && part * part_steps >= steps) return;
  const int part_begin = visible.begin + part * part_steps * kStepKeys;
  const int part_end = min(visible.end, part_begin + part_steps * kStepKeys);
  const int warp_begin = part_begin + warp * kBlockN;

  // Loads. The queries come with the first values.
  const uint32_t q = shared_address(shared.q), ring = shared_address(shared.ring[warp]);
  const auto slot_at = [ring](int i) { return ring + i * Config::kSlotBytes; };
  KeyLoader<Config> loader(params, sequence, batch, head_kv, schedule.page_shift, warp_begin,
                           part_end, lane);
  loader.template load<false>(slot_at(0));
  load_queries<Config>(params, sequence, tile, q);
  loader.template load<true>(slot_at(1));
#pragma unroll 1
  for (int i = 2; i < kSlots; i += 2) {
    loader.template load<false>(slot_at(i));
    if (i + 1 < kSlots) loader.template load<true>(slot_at(i + 1));
  }

  // Rows that the lane holds some elements of: row r * 8 + lane / 4.
  int queries[2 * kRowTiles];
  float sinks[2 * kRowTiles], slopes[2 * kRowTiles];
  ScoreTransform transform(params, batch, 0, mask.shift);
  transform.slope = 0.f;  // heads differ: ALiBi is applied here
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const int row = r * 8 + lane / 4, head = tile.head_of(row);
    queries[r] = tile.query_of(row);
    const bool has_sink = params.s_aux != nullptr && part == 0 && warp == 0;
    sinks[r] = has_sink ? params.s_aux[head] : -INFINITY;
    if constexpr (kFull) slopes[r] = ScoreTransform(params, batch, head, mask.shift).slope;
  }
  float out[kRowTiles][kHeadDimV / 8][4] = {};
  SoftmaxState<kRowTiles> softmax(scale_log2, sinks, lane % 4 == 0);

  ptx::cp_async_wait<kSlots - 2>();
  __syncthreads();  // the queries have arrived
  int slot = 0;
  const auto next_slot = [&slot] { slot = slot + 1 == kSlots ? 0 : slot + 1; };
#pragma unroll 1
  for (int key = warp_begin; key < part_end; key += kStepKeys) {
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // K has arrived
    float scores[kRowTiles][kColTiles][4];
    compute_scores<T, kHeadDim>(scores, q, slot_at(slot), lane);
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
                   softmax.exponentiate(scores[m][n][j + 1], m, j + 1), T());
        }
      }
    }
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // V has arrived
    const uint32_t values = slot_at(slot) + TileLayout<kHeadDimV>::by_columns(lane);
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      multiply_by_values<T, kHeadDimV, 1>(out, p[n], values, n);
    }
    __syncwarp();  // all lanes are done with the slot
    loader.template load<kSlots % 2 == 0>(slot_at(slot));
    next_slot();
  }

  // Epilogue. Parts behind the last that has keys have returned.
  const int parts_used = part_steps == steps ? 1 : (steps + part_steps - 1) / part_steps;
  if (parts_used == 1) {
    merge_warps<Config>(shared, tile, softmax, out, warp, lane,
                        [&](int row, int col, const float4& x, float reference, float sum) {
                          store_result<Config>(params, sequence, tile, row, col, x, reference, sum);
                        });
    return;
  }
  constexpr int kFours = kHeadDimV / 4;
  const int place = batch * gridDim.x + blockIdx.x;
  const int64_t first_stored = int64_t{1} * place * schedule.splits * schedule.rows;
  const TileParts parts{reinterpret_cast<float4*>(params.partial_out) + first_stored * kFours,
                        reinterpret_cast<float2*>(params.partial_rows) + first_stored};
  merge_warps<Config>(shared, tile, softmax, out, warp, lane,
                      [&](int row, int col, const float4& x, float reference, float sum) {
                        const int stored = part * schedule.rows + row;
                        __stcg(parts.out + stored * kFours + col / 4, x);
                        if (col == 0) __stcg(parts.rows + stored, make_float2(reference, sum));
                      });
  if (!is_last_block(params.counters + place, parts_used)) return;
  merge_parts<Config>(params, sequence, tile, parts, parts_used, schedule.rows, shared, warp, lane);
}

// Grid: (nheads_kv * row_tiles, splits, batch), see launch_decode. params.window_left and
// window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ DecodeSchedule schedule, float scale_log2) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if constexpr (Config::kOverlaps) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
  }
  attend<Config>(params, schedule, schedule.first_batch + blockIdx.z, scale_log2, shared, warp,
                 lane);
  if (params.cu_seqlens_q != nullptr && blockIdx.y == 0) {
    clear_gaps<typename Config::T>(params, (blockIdx.z * gridDim.x + blockIdx.x) * kWarps + warp,
                                   gridDim.z * gridDim.x * kWarps, lane);
  }
}

}  // namespace flash::decode
