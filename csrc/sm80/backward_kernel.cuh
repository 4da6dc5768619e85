// Attention backward for Ampere-class tensor cores: FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// A thread block takes one block of keys of one head of K and V and walks over the blocks of
// queries that see them, for each query head of the group. P is recomputed from the log-sum-exp:
//   P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dK = dS^T Q, dQ = dS K.
// dK and dV stay in registers, summed over the group; where there are few tiles, several thread
// blocks divide the heads of a group. dQ is a sum over thread blocks: each adds its part to a
// float32 workspace, in any order or, to be deterministic, in the order of the keys.
#pragma once

#include <cmath>

#include "common/dropout.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/parts.h"
#include "common/range.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/sequence_tiles.h"
#include "common/shared_address.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "common/warp_matmul.h"
#include "params.h"
#include "ptx/atomics.h"
#include "ptx/cp_async.h"
#include "ptx/opaque.h"
#include "sm80/backward_config.cuh"
#include "sm80/key_block.h"
#include "sm80/shared_tile.cuh"

namespace flash::sm80 {

// Row tiles of the dQ workspace that come before those of a sequence.
__device__ inline int dq_tile(const AttentionParams& params, const Sequence& sequence, int batch) {
  return params.cu_seqlens_q == nullptr ? batch * ((params.seqlen_q + 15) / 16)
                                        : sequence.q_first / 16 + batch;
}

// D = A B, see multiply_accumulate.
template <typename T, int kDepth, int kRowTiles, int kColTiles, typename A, typename B>
__device__ void multiply(float (&d)[kRowTiles][kColTiles][4], A a, B b, int col_block = 0) {
  clear(d);
  multiply_accumulate<T, kDepth>(d, a, b, col_block);
}

// S becomes P = exp(S - lse). p: (kRowTiles, kColTiles) accumulators of m16n8
// lse: shared, (16 * kRowTiles)
template <int kRowTiles, int kColTiles>
__device__ void exponentiate(float (&p)[kRowTiles][kColTiles][4], const float* lse,
                             float scale_log2, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const int j = r % 2 * 2;
    const float row_lse = lse[r * 8 + lane / 4];
    // A row without a visible key has scores of -inf only: P = exp(-inf - 0) = 0.
    const float reference = row_lse == -INFINITY ? 0.f : row_lse * kLog2e;
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      p[r / 2][n][j] = ptx::ex2(fmaf(p[r / 2][n][j], scale_log2, -reference));
      p[r / 2][n][j + 1] = ptx::ex2(fmaf(p[r / 2][n][j + 1], scale_log2, -reference));
    }
  }
}

// x *= y
template <int kRowTiles, int kColTiles>
__device__ void multiply_elements(float (&x)[kRowTiles][kColTiles][4],
                                  const float (&y)[kRowTiles][kColTiles][4]) {
  for_each(x, [&](float& element, int m, int n, int j) { element *= y[m][n][j]; });
}

// dP becomes dS = P * (dP - delta). kDrops: P is marked where dropout drops it.
// ds, p: (kRowTiles, kColTiles) accumulators of m16n8; delta: shared, (16 * kRowTiles)
template <bool kDrops, int kRowTiles, int kColTiles>
__device__ void differentiate_scores(float (&ds)[kRowTiles][kColTiles][4],
                                     const float (&p)[kRowTiles][kColTiles][4], const float* delta,
                                     int lane, float delta_scale = 1.f) {
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const float row_delta = delta[r * 8 + lane / 4] * delta_scale;
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = r / 2, j = r % 2 * 2 + half;
        const float x = p[m][n][j], dp = ds[m][n][j];
        ds[m][n][j] = kDrops ? gradient_of_marked(x, dp, row_delta) : x * (dp - row_delta);
      }
    }
  }
}

// Adds a row tile, or part of its columns, to the workspace.
// accum: the lane's first element of the row tile; col_of(n): where accumulator n lies, in units of
// 8 columns
template <int kColTiles, typename ColOf>
__device__ void add_to_workspace(float* accum, const float (&dq)[kColTiles][4], ColOf col_of) {
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::red_add(accum + (col_of(n) * 4 + j) * 32, dq[n][j]);
  }
}

// Deterministic dQ: the key blocks that a block of queries sees add to it in their order.
template <int kBlockM, int kBlockN>
struct DqTurn {
  int* turns;      // one for each head and row tile; the first of a block of queries is used
  int first_tile;  // of the head and sequence
  const Mask& mask;
  int seqlen_q, n_block;

  // Less than, not unequal: if bad cu_seqlens make sequences share counters, nothing waits forever.
  __device__ void wait(int m_begin) const {
    const int mine = rank(m_begin);
    while (ptx::load_acquire(place(m_begin)) < mine) {
    }
  }
  __device__ void pass_on(int m_begin) const { ptx::red_release_add(place(m_begin), 1); }

 private:
  __device__ int* place(int m_begin) const { return turns + (first_tile + m_begin / 16); }
  __device__ int rank(int m_begin) const {
    return n_block - key_blocks<kBlockN>(mask, m_begin, min(m_begin + kBlockM, seqlen_q)).begin;
  }
};

// Grid: the parts of all key blocks of all heads of K and V of all sequences, see KeyBlock.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    backward_kernel(const __grid_constant__ BackwardParams params,
                    const __grid_constant__ SequenceTiles tiles,
                    const __grid_constant__ KeyBlockOrder order) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFull;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kThreads = Config::kThreads;
  constexpr int kStages = Config::kStages;
  // A warp's part of S and dP; of dK and dV; of dQ: in tiles of 16 rows and of 8 columns.
  constexpr int kRowsS = kBlockM / Config::kWarpsRowS / 16;
  constexpr int kColsS = kBlockN / Config::kWarpsColS / 8;
  constexpr int kRowsDkv = kBlockN / Config::kWarpsRowDkv / 16;
  constexpr int kColsDk = kHeadDim / Config::kWarpsColDkv / 8;
  constexpr int kColsDv = kHeadDimV / Config::kWarpsColDkv / 8;
  constexpr int kRowsDq = kBlockM / Config::kWarpsRowDq / 16;
  constexpr int kColsDq = kHeadDim / Config::kWarpsColDq / 8;
  constexpr int kColsDqStep = kColsDq / Config::kTile.dq_steps;
  using RowDkv = WarpBlocks<Config::kWarpsRowDkv, kRowsDkv>;
  using ColDq = WarpBlocks<Config::kWarpsColDq, kColsDq / 2>;
  static_assert(kColsDqStep % 2 == 0 && kColsDq % kColsDqStep == 0);

  // Indices.
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const KeyBlock block(params, tiles, order, blockIdx.x);
  const int n_block = block.n_block, n_begin = n_block * kBlockN;
  const int batch = block.batch, head_kv = block.head_kv;
  const int group = params.nheads / params.nheads_kv;
  const Sequence sequence(params, batch);
  const int seqlen_q = warp_uniform(sequence.seqlen_q);
  const int seqlen_k = warp_uniform(sequence.seqlen_k);
  if (n_begin < 0 || n_begin >= seqlen_k) return;
  const Mask mask{seqlen_k, seqlen_k - seqlen_q, params.window_left, params.window_right};
  const Range m_blocks = query_blocks<kBlockM>(mask, seqlen_q, n_begin, n_begin + kBlockN);
  const int row_s = warp / Config::kWarpsColS, col_s = warp % Config::kWarpsColS;
  const int row_dkv = warp / Config::kWarpsColDkv, col_dkv = warp % Config::kWarpsColDkv;
  const int row_dq = warp / Config::kWarpsColDq, col_dq = warp % Config::kWarpsColDq;

  // Shared memory. Of S and dP a warp has rows and columns that lie together; columns of P and dS
  // as rows of dK and dV, and those of dK, dV and dQ, are shared 16 by 16 (WarpBlocks).
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const uint32_t shared_q = shared_address(shared.q), shared_dout = shared_address(shared.dout);
  constexpr uint32_t kQBytes = sizeof(shared.q[0]), kDoutBytes = sizeof(shared.dout[0]);
  const auto warp_row_s = [&](int m) { return row_s * kRowsS + m; };
  const auto warp_col_s = [&](int n) { return col_s * kColsS + n; };
  const auto v_as_b = [&] {  // of dP
    return OperandB<kHeadDimV, Order::kRows>(shared_address(shared.v), col_s * kColsS / 2, 0, lane);
  };

  // K and V.
  {
    TileLoader<T, kBlockN, kHeadDim, kThreads, kFull> k_loader(
        rows_of<const T>(params.k, sequence.k_batch, sequence.k_first + n_begin, head_kv),
        params.k.row_stride, params.headdim, params.aligned, threadIdx.x);
    k_loader.load(shared_address(shared.k), seqlen_k - n_begin);
    TileLoader<T, kBlockN, kHeadDimV, kThreads, kFull> v_loader(
        rows_of<const T>(params.v, sequence.k_batch, sequence.k_first + n_begin, head_kv),
        params.v.row_stride, params.headdim_v, params.aligned, threadIdx.x);
    v_loader.load(shared_address(shared.v), seqlen_k - n_begin);
  }

  uint32_t held_v[kHeadDimV / 16][kColsS / 2][4];
  bool must_hold_v = Config::kHoldsV;
  float dk[kRowsDkv][kColsDk][4] = {};
  float dv[kRowsDkv][kColsDv][4] = {};
  const float scale_log2 = scale_log2_of(params);

  // The steps of this part, head by head.
  const int head_steps = max(m_blocks.end - m_blocks.begin, 0), steps = head_steps * group;
  int step = steps * block.part / block.parts;
  const int end_step = steps * (block.part + 1) / block.parts;
  while (step < end_step) {
    // The last queries come first: under a causal mask all key blocks see those, so that they add
    // to dQ in step with each other.
    const int of_group = step / head_steps, head_end = (of_group + 1) * head_steps;
    const int head = head_kv * group + of_group;
    const Range blocks{m_blocks.begin + head_end - min(head_end, end_step),
                       m_blocks.begin + head_end - step};
    step = head_end;
    Walk<-1> queries(blocks);
    // What loading needs is computed at each load (ptx::opaque) instead of occupying registers.
    const auto load_queries = [&](int m_begin, int stage) {
      const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
      const int row = ptx::opaque(sequence.q_first + m_begin), rows = seqlen_q - m_begin;
      TileLoader<T, kBlockM, kHeadDim, kThreads, kFull> q_loader(
          rows_of<const T>(params.q, sequence.q_batch, row, head), params.q.row_stride,
          params.headdim, params.aligned, thread);
      q_loader.load(shared_q + stage * kQBytes, rows);
      TileLoader<T, kBlockM, kHeadDimV, kThreads, kFull> dout_loader(
          rows_of<const T>(params.dout, sequence.q_batch, row, head), params.dout.row_stride,
          params.headdim_v, params.aligned, thread);
      dout_loader.load(shared_dout + stage * kDoutBytes, rows);
    };
    const auto load_statistics = [&](int m_begin) {
      const int64_t source_row = sequence.q_batch * params.lse_batch_stride +
                                 ptx::opaque(head) * params.lse_head_stride + sequence.q_first;
#pragma unroll
      for (int i = ptx::opaque(static_cast<int>(threadIdx.x)); i < 2 * kBlockM; i += kThreads) {
        const int row = m_begin + i % kBlockM;
        const float* const source = (i < kBlockM ? params.lse : params.delta) + source_row + row;
        // Behind the last query P is zero, also where a bias would make it infinite.
        if (kFull && i < kBlockM && row >= seqlen_q) {
          shared.statistics[i] = INFINITY;
          continue;
        }
        ptx::cp_async_4_zfill(shared_address(shared.statistics) + i * sizeof(float), source,
                              row < seqlen_q);
      }
    };
    const int first_dq_tile = head * params.row_tiles + dq_tile(params, sequence, batch);
    const ScoreTransform transform(params, batch, head, mask.shift);
    const Dropout dropout(params, batch, head);

    const DqTurn<kBlockM, kBlockN> dq_turn{params.dq_turn, first_dq_tile, mask, seqlen_q, n_block};

    load_queries(queries.place() * kBlockM, 0);
    load_statistics(queries.place() * kBlockM);
    if (must_hold_v) {
      ptx::cp_async_wait_all();
      __syncthreads();  // V has arrived
      hold(held_v, v_as_b());
      must_hold_v = false;
    }

    int stage = 0;
    for (; queries.valid(); queries.advance()) {
      const int m_begin = queries.place() * kBlockM;
      const bool more = queries.has_next();
      ptx::cp_async_wait_all();
      __syncthreads();  // Q, dO and statistics have arrived; every warp is done with the last step
      if (kStages == 2 && more) load_queries(queries.next() * kBlockM, stage ^ 1);
      const uint32_t q = shared_q + stage * kQBytes, dout = shared_dout + stage * kDoutBytes;

      // P, first S.
      float p[kRowsS][kColsS][4];
      const OperandA<kHeadDim, Order::kRows> q_as_a(q, row_s * kRowsS, 0, lane);
      const OperandB<kHeadDim, Order::kRows> k_as_b(shared_address(shared.k), col_s * kColsS / 2, 0,
                                                    lane);
      multiply<T, kHeadDim / 16>(p, q_as_a, k_as_b);
      const int warp_m_begin = m_begin + row_s * kRowsS * 16;
      const int warp_n_begin = n_begin + col_s * kColsS * 8;
      const int first_row = warp_m_begin + lane / 4, first_key = warp_n_begin + lane % 4 * 2;
      const float* const statistics = shared.statistics + row_s * kRowsS * 16;
      const auto mask_scores = [&] {
        if (!mask.cuts(warp_m_begin, kRowsS * 16, warp_n_begin, kColsS * 8)) return;
        const auto row_of = [&](int m, int half) { return first_row + m * 16 + half * 8; };
        apply_mask(p, mask, row_of, first_key);
      };
      const auto store_p = [&](bool drops) {
        exponentiate(p, statistics, scale_log2, lane);
        if (drops) mark_dropped(p, dropout, warp_m_begin / 16, warp_n_begin / 16, lane);
        store_fragments<kBlockN, kFull>(p, shared.p, warp_row_s, warp_col_s, ptx::opaque(lane));
      };
      const auto store_ds = [&](bool drops) {
        float ds[kRowsS][kColsS][4];  // first dP
        const OperandA<kHeadDimV, Order::kRows> dout_as_a(dout, row_s * kRowsS, 0, lane);
        if constexpr (Config::kHoldsV) {
          multiply<T, kHeadDimV / 16>(ds, dout_as_a, HeldOperandB(held_v));
        } else {
          multiply<T, kHeadDimV / 16>(ds, dout_as_a, v_as_b());
        }
        if (drops) {
          differentiate_scores<true>(ds, p, statistics + kBlockM, lane, params.delta_scale);
        } else {
          differentiate_scores<false>(ds, p, statistics + kBlockM, lane);
        }
        store_fragments<kBlockN>(ds, shared.ds, warp_row_s, warp_col_s, lane);
      };
      if constexpr (!kFull) {
        mask_scores();
        store_p(false);
        store_ds(false);
      } else if (transform.is_curved()) {
        float derivative[kRowsS][kColsS][4];
        transform.apply(p, first_row, first_key, mask_scores,
                        [&](int m, int n, int j, float slope) { derivative[m][n][j] = slope; });
        mask_scores();
        store_p(dropout.enabled);
        multiply_elements(p, derivative);
        store_ds(dropout.enabled);
      } else {
        transform.add_bias(p, first_row, first_key);
        mask_scores();
        // Without a branch between them, exponentials run beside the product that is dP.
        if (dropout.enabled) {
          store_p(true);
          store_ds(true);
        } else {
          store_p(false);
          store_ds(false);
        }
      }

      const bool passes_turn = params.dq_turn != nullptr && queries.has_previous();
      if (passes_turn)
        __threadfence();  // the last step's additions to dQ come before its turn ends
      __syncthreads();    // P and dS are written; every warp is done with the statistics
      if (passes_turn && threadIdx.x == 0) dq_turn.pass_on(queries.previous() * kBlockM);
      if (more) load_statistics(queries.next() * kBlockM);

      // dV.
      const OperandA<kBlockN, Order::kTransposed, RowDkv::kStride> p_transposed(
          shared_address(shared.p), 0, RowDkv::first(row_dkv), lane);
      const OperandB<kHeadDimV, Order::kTransposed, Config::kWarpsColDkv> dout_as_b(dout, 0,
                                                                                    col_dkv, lane);
      multiply_accumulate<T, kBlockM / 16>(dv, p_transposed, dout_as_b);

      // dK.
      const OperandA<kBlockN, Order::kTransposed, RowDkv::kStride> ds_transposed(
          shared_address(shared.ds), 0, RowDkv::first(row_dkv), lane);
      const OperandB<kHeadDim, Order::kTransposed, Config::kWarpsColDkv> q_as_b(q, 0, col_dkv,
                                                                                lane);
      multiply_accumulate<T, kBlockM / 16>(dk, ds_transposed, q_as_b);
      if constexpr (kStages == 2) {
        stage ^= 1;
      } else if (more) {
        __syncthreads();  // every warp is done with Q and dO
        load_queries(queries.next() * kBlockM, 0);
      }

      // dQ, some columns at a time.
      if (params.dq_turn != nullptr) {
        if (lane == 0) dq_turn.wait(m_begin);
        __syncwarp();
      }
      const OperandA<kBlockN, Order::kRows> ds_as_a(shared_address(shared.ds), row_dq * kRowsDq, 0,
                                                    lane);
      const OperandB<kHeadDim, Order::kTransposed, ColDq::kStride> k_transposed(
          shared_address(shared.k), 0, ColDq::first(col_dq), lane);
#pragma unroll
      for (int first_col = 0; first_col < kColsDq; first_col += kColsDqStep) {
        float dq[kRowsDq][kColsDqStep][4];
        multiply<T, kBlockN / 16>(dq, ds_as_a, k_transposed, first_col / 2);
#pragma unroll
        for (int m = 0; m < kRowsDq; ++m) {
          const int tile = m_begin / 16 + row_dq * kRowsDq + m;
          if (tile * 16 >= seqlen_q) break;
          add_to_workspace(
              params.dq_accum + int64_t{first_dq_tile + tile} * (16 * kHeadDim) + lane, dq[m],
              [&](int n) {
                return ((first_col + n) / 2 * ColDq::kStride + ColDq::first(col_dq)) * 2 + n % 2;
              });
        }
      }
    }
    if (params.dq_turn != nullptr) __threadfence();
    __syncthreads();  // every warp is done with Q, dS, K and V, and its dQ
    if (params.dq_turn != nullptr && threadIdx.x == 0)
      dq_turn.pass_on(queries.previous() * kBlockM);
  }

  // Epilogue: through shared memory, for 16-byte stores.
  if (steps * block.part / block.parts == end_step) {  // no step: K and V may be on their way
    ptx::cp_async_wait_all();
    __syncthreads();
  }
  if (block.parts > 1) {
    constexpr int kDkSize = kRowsDkv * kColsDk * 32, kSize = kDkSize + kRowsDkv * kColsDv * 32;
    constexpr int kStride = kThreads / 32 * kSize;  // from part to part
    const KeyBlock again(params, tiles, order, ptx::opaque(static_cast<int>(blockIdx.x)));
    float4* const parts = reinterpret_cast<float4*>(params.partial_dkv) +
                          int64_t{again.first_part} * kStride + warp * kSize;
    float4* const mine = parts + again.part * kStride;
    leave_part(mine, dk, lane);
    leave_part(mine + kDkSize, dv, lane);
    if (!is_last_block(params.counters + again.first_part, again.parts)) return;
    clear(dk);
    clear(dv);
#pragma unroll 1
    for (int i = 0; i < again.parts; ++i) {
      add_part(dk, parts + i * kStride, lane);
      add_part(dv, parts + i * kStride + kDkSize, lane);
    }
  }
  scale_by(dk, params.gradient_scale);
  if (kFull && params.rng_state != nullptr) scale_by(dv, params.dropout_scale);
  const auto warp_row_dkv = [&](int m) { return m * RowDkv::kStride + RowDkv::first(row_dkv); };
  const auto warp_col_dkv = [&](int n) {
    return (n / 2 * Config::kWarpsColDkv + col_dkv) * 2 + n % 2;
  };
  store_fragments<kHeadDim>(dk, shared.k, warp_row_dkv, warp_col_dkv, lane);
  store_fragments<kHeadDimV>(dv, shared.v, warp_row_dkv, warp_col_dkv, lane);
  __syncthreads();
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  // Where they go is computed again instead of occupying registers.
  const KeyBlock place(params, tiles, order, ptx::opaque(static_cast<int>(blockIdx.x)));
  const Sequence keys(params, place.batch);
  const int first = place.n_block * kBlockN;
  const int row = keys.k_first + first, rows = keys.seqlen_k - first;
  store_tile<kBlockN, kHeadDim, kThreads, kFull>(
      shared.k, rows_of<T>(params.dk, keys.k_batch, row, place.head_kv), params.dk.row_stride, rows,
      params.headdim, params.aligned, thread);
  store_tile<kBlockN, kHeadDimV, kThreads, kFull>(
      shared.v, rows_of<T>(params.dv, keys.k_batch, row, place.head_kv), params.dv.row_stride, rows,
      params.headdim_v, params.aligned, thread);
}

// Threads of a row in the delta kernel, threads and rows of its thread blocks.
template <int kHeadDimV>
constexpr int kDeltaLanes = kHeadDimV <= 32    ? 4
                            : kHeadDimV <= 64  ? 8
                            : kHeadDimV <= 128 ? 16
                                               : 32;
template <int kHeadDimV>
constexpr int kDeltaThreads = kHeadDimV <= 32 ? 64 : 128;
template <int kHeadDimV>
constexpr int kDeltaRows = kDeltaThreads<kHeadDimV> / kDeltaLanes<kHeadDimV>;

// delta = rowsum(dO * O) - dlse; clears the workspace of dQ: packed tiles are all of its row tiles.
// Grid: (tiles of 16 queries * parts * nheads).
template <typename T, int kHeadDim, int kHeadDimV, bool kAnyAlignment>
__global__ void __launch_bounds__(kDeltaThreads<kHeadDimV>)
    backward_delta_kernel(const __grid_constant__ BackwardParams params,
                          const __grid_constant__ SequenceTiles tiles) {
  constexpr int kLanes = kDeltaLanes<kHeadDimV>, kRows = kDeltaRows<kHeadDimV>;
  constexpr int kParts = 16 / kRows;
  const int head = blockIdx.x % params.nheads, index = blockIdx.x / params.nheads;
  const int part = index % kParts;
  const auto [batch, block] = tiles.find(index / kParts);
  const Sequence sequence(params, batch);
  const bool empty = block < 0 || block * 16 >= sequence.seqlen_q;
  if (empty && !tiles.packed()) return;
  const int64_t tile =
      static_cast<int64_t>(head) * params.row_tiles + dq_tile(params, sequence, batch) + block;
  auto* const accum =
      reinterpret_cast<float4*>(params.dq_accum + (tile * 16 + part * kRows) * kHeadDim);
#pragma unroll
  for (int i = threadIdx.x; i < kRows * (kHeadDim / 4); i += kDeltaThreads<kHeadDimV>) {
    accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (params.dq_turn != nullptr && part == 0 && threadIdx.x == 0) params.dq_turn[tile] = 0;
  if (empty) return;
  const int first_row = block * 16 + part * kRows;
  const int row = first_row + threadIdx.x / kLanes;
  const int col = threadIdx.x % kLanes * 8;
  const T* const dout =
      rows_of<const T>(params.dout, sequence.q_batch, sequence.q_first + row, head) + col;
  const T* const out =
      rows_of<const T>(params.out, sequence.q_batch, sequence.q_first + row, head) + col;
  float sum = 0.f;
  if (row < sequence.seqlen_q && col < params.headdim_v) {
    if (!kAnyAlignment || params.aligned) {
      const uint4 dout_chunk = *reinterpret_cast<const uint4*>(dout);
      const uint4 out_chunk = *reinterpret_cast<const uint4*>(out);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum += static_cast<float>(reinterpret_cast<const T*>(&dout_chunk)[i]) *
               static_cast<float>(reinterpret_cast<const T*>(&out_chunk)[i]);
      }
    } else {
      for (int i = 0; i < min(8, params.headdim_v - col); ++i) {
        sum += static_cast<float>(dout[i]) * static_cast<float>(out[i]);
      }
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (row < sequence.seqlen_q && threadIdx.x % kLanes == 0) {
    const int64_t place = sequence.q_batch * params.lse_batch_stride +
                          head * params.lse_head_stride + sequence.q_first + row;
    // A row without a visible key has no gradient, whatever arrives at its log-sum-exp.
    const bool counts = params.dlse != nullptr && params.lse[place] != -INFINITY;
    params.delta[place] = sum - (counts ? params.dlse[place] : 0.f);
  }
}

constexpr int kDqTile = 64;  // queries: a row tile for each warp

// dQ = gradient_scale * the workspace, rounded to T. Grid: (tiles * nheads).
template <typename T, int kHeadDim, bool kAnyAlignment>
__global__ void __launch_bounds__(128)
    backward_dq_kernel(const __grid_constant__ BackwardParams params,
                       const __grid_constant__ SequenceTiles tiles) {
  __shared__ __align__(128) T stage[4][16 * kHeadDim];
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int head = blockIdx.x % params.nheads;
  const auto [batch, block] = tiles.find(blockIdx.x / params.nheads);
  const Sequence sequence(params, batch);
  const int row_tile = block * (kDqTile / 16) + warp, row = row_tile * 16;
  if (row < 0 || row >= sequence.seqlen_q) return;
  const int64_t tile =
      static_cast<int64_t>(head) * params.row_tiles + dq_tile(params, sequence, batch) + row_tile;
  const float* const accum = params.dq_accum + tile * (16 * kHeadDim) + lane;
  float dq[1][kHeadDim / 8][4];
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) dq[0][n][j] = accum[(n * 4 + j) * 32];
  }
  scale_by(dq, params.gradient_scale);
  store_fragments<kHeadDim>(dq, stage[warp], [](int) { return 0; }, [](int n) { return n; }, lane);
  __syncwarp();
  store_tile<16, kHeadDim, 32, kAnyAlignment>(
      stage[warp], rows_of<T>(params.dq, sequence.q_batch, sequence.q_first + row, head),
      params.dq.row_stride, sequence.seqlen_q - row, params.headdim, params.aligned, lane);
}

}  // namespace flash::sm80
