// Attention forward for Ampere-class tensor cores: FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// A thread block takes one block of queries of one head and walks over the blocks of keys that they
// see. Each warp owns kWarpRows queries and the whole head dim, so no sum crosses warps. Scores and
// output stay in registers.
//
// Rows past the end of a sequence are zero when loaded, whatever memory holds there. A key inside
// the sequence that the mask hides from a query has probability 0, but in a block that other keys
// make visible its V row is still multiplied: NaN or Inf stored there does reach the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/mask.h"
#include "common/pack.h"
#include "common/shared_tile.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma_sync.h"
#include "sm80/forward_config.cuh"

namespace flash::sm80 {

// S = Q K^T for one warp's queries and one block of keys.
// scores: (kWarpRows / 16, kBlockN / 8) accumulators of m16n8
// q: the warp's (kWarpRows, kHeadDim) rows, k: (kBlockN, kHeadDim), shared addresses of tiles
template <typename T, int kHeadDim, int kRowTiles, int kColTiles>
__device__ void compute_scores(float (&scores)[kRowTiles][kColTiles][4], uint32_t q, uint32_t k,
                               int lane) {
  using Layout = TileLayout<kHeadDim>;
  const uint32_t q_offset = Layout::by_columns(lane), k_offset = Layout::by_rows(lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.f;
    }
  }
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    uint32_t q_fragment[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::ldmatrix_x4(q_fragment[m], q + Layout::in_block(q_offset, m, d));
    }
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t k_fragment[4];  // keys n*8 .. n*8+15: two B operands
      ptx::ldmatrix_x4(k_fragment, k + Layout::in_block(k_offset, n / 2, d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16(scores[m][n], q_fragment[m], k_fragment[0], k_fragment[1], T());
        ptx::mma_m16n8k16(scores[m][n + 1], q_fragment[m], k_fragment[2], k_fragment[3], T());
      }
    }
  }
}

// O += P V with P = exp(S), 16 keys at a time: while the tensor cores multiply by one part of P,
// the next is computed. The accumulators of two neighbouring key tiles, once rounded to T, are an A
// operand: no data moves between lanes.
// out: (kWarpRows / 16, kHeadDim / 8), scores: (kWarpRows / 16, kBlockN / 8) accumulators of m16n8
// v: shared address of the (kBlockN, kHeadDim) tile
template <typename T, int kHeadDim, int kRowTiles, int kColTiles>
__device__ void accumulate_output(float (&out)[kRowTiles][kHeadDim / 8][4],
                                  SoftmaxState<kRowTiles>& softmax,
                                  const float (&scores)[kRowTiles][kColTiles][4], uint32_t v,
                                  int lane) {
  using Layout = TileLayout<kHeadDim>;
  const uint32_t v_offset = Layout::by_columns(lane);
#pragma unroll
  for (int n = 0; n < kColTiles; n += 2) {
    uint32_t p_fragment[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i % 2 * 2;
        const float* const pair = &scores[m][n + i / 2][j];
        const float low = softmax.exponentiate(pair[0], m, j);
        const float high = softmax.exponentiate(pair[1], m, j + 1);
        p_fragment[m][i] = pack(low, high, T());
      }
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t v_fragment[4];  // columns d*16 .. d*16+15: two B operands
      ptx::ldmatrix_x4_trans(v_fragment, v + Layout::in_block(v_offset, n / 2, d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16(out[m][2 * d], p_fragment[m], v_fragment[0], v_fragment[1], T());
        ptx::mma_m16n8k16(out[m][2 * d + 1], p_fragment[m], v_fragment[2], v_fragment[3], T());
      }
    }
  }
}

// Writes the first `valid_rows` of one warp's rows of the output, as 16-byte stores.
// out: (kWarpRows / 16, kHeadDim / 8) accumulators of m16n8
// stage: the warp's own (kWarpRows, kHeadDim) shared tile; target: its first row in global memory
template <typename T, int kHeadDim, int kRowTiles>
__device__ void store_output(const float (&out)[kRowTiles][kHeadDim / 8][4], T* stage, T* target,
                             int64_t row_stride, int valid_rows, int lane) {
  using Layout = TileLayout<kHeadDim>;
  auto* const stage_bytes = reinterpret_cast<unsigned char*>(stage);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const pair = &out[m][n][2 * half];
        const uint32_t offset = Layout::offset(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(stage_bytes + offset) = pack(pair[0], pair[1], T());
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kRowTiles * 16 * Layout::kChunks; i += 32) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    if (row < valid_rows) {
      *reinterpret_cast<uint4*>(target + row * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(stage_bytes + Layout::offset(row, chunk));
    }
  }
}

// Grid: (nheads, query blocks, batch), see launch_forward. params.window_left and window_right are
// bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params, int first_m_block,
                   int first_batch) {
  using T = typename Config::T;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kWarpRows = Config::kWarpRows;
  constexpr int kRowTiles = kWarpRows / 16;
  static_assert(kWarpRows % 16 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0);
  using QLoader = TileLoader<T, kBlockM, kHeadDim, Config::kThreads>;
  using KVLoader = TileLoader<T, kBlockN, kHeadDim, Config::kThreads>;

  // Indices. Under a causal mask the last queries see the most keys: they go first, so that short
  // blocks fill the end.
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const unsigned head = blockIdx.x, batch = first_batch + blockIdx.z;
  const unsigned head_kv = head / (params.nheads / params.nheads_kv);
  const int m_begin = (first_m_block + gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int warp_m_begin = m_begin + warp * kWarpRows;
  const Mask mask{params.seqlen_k, params.seqlen_k - params.seqlen_q, params.window_left,
                  params.window_right};
  const BlockRange blocks =
      key_blocks<kBlockN>(mask, m_begin, min(m_begin + kBlockM, params.seqlen_q));

  // The first rows that this thread block loads.
  const int64_t first_key = static_cast<int64_t>(blocks.begin) * kBlockN;
  const T* const q = static_cast<const T*>(params.q) + batch * params.q_batch_stride +
                     head * params.q_head_stride + m_begin * params.q_row_stride;
  const T* const k = static_cast<const T*>(params.k) + batch * params.k_batch_stride +
                     head_kv * params.k_head_stride + first_key * params.k_row_stride;
  const T* const v = static_cast<const T*>(params.v) + batch * params.v_batch_stride +
                     head_kv * params.v_head_stride + first_key * params.v_row_stride;

  // Shared memory.
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  T* const warp_rows = shared.q + warp * kWarpRows * kHeadDim;
  const uint32_t shared_warp_q = shared_address(warp_rows);
  const uint32_t shared_k = shared_address(shared.k);
  const uint32_t shared_v = shared_address(shared.v);

  float out[kRowTiles][kHeadDim / 8][4] = {};
  SoftmaxState<kRowTiles> softmax(params.softmax_scale);

  // Main loop. V is on its way during the first matmul, the next K during the second.
  KVLoader k_loader(k, params.k_row_stride, threadIdx.x);
  KVLoader v_loader(v, params.v_row_stride, threadIdx.x);
  if (blocks.begin < blocks.end) {
    QLoader q_loader(q, params.q_row_stride, threadIdx.x);
    q_loader.load_next(shared_address(shared.q), params.seqlen_q - m_begin);
    k_loader.load_next(shared_k, params.seqlen_k - blocks.begin * kBlockN);
  }
  for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
    const int n_begin = n_block * kBlockN;  // first key of the block
    ptx::cp_async_wait_all();
    __syncthreads();  // K has arrived; every warp is done with the last V
    v_loader.load_next(shared_v, params.seqlen_k - n_begin);

    float scores[kRowTiles][kBlockN / 8][4];
    compute_scores<T, kHeadDim>(scores, shared_warp_q, shared_k, lane);
    if (mask.cuts(m_begin, kBlockM, n_begin, kBlockN)) {
      apply_mask(scores, mask, warp_m_begin + lane / 4, n_begin + lane % 4 * 2);
    }
    online_softmax_step(softmax, scores, out);

    ptx::cp_async_wait_all();
    __syncthreads();  // V has arrived; every warp is done with K
    if (n_block + 1 < blocks.end) {
      k_loader.load_next(shared_k, params.seqlen_k - n_begin - kBlockN);
    }
    accumulate_output<T, kHeadDim>(out, softmax, scores, shared_v, lane);
  }

  // Epilogue. Only this warp reads its rows of shared.q, so they can take its output.
  float lse[2 * kRowTiles];
  normalize_output(softmax, out, lse);
  const int valid_rows = params.seqlen_q - warp_m_begin;
  T* const out_rows = static_cast<T*>(params.out) + batch * params.out_batch_stride +
                      head * params.out_head_stride + warp_m_begin * params.out_row_stride;
  store_output<T, kHeadDim>(out, warp_rows, out_rows, params.out_row_stride, valid_rows, lane);
  if (lane % 4 == 0) {
    const int64_t batch_head = static_cast<int64_t>(batch) * params.nheads + head;
    float* const lse_rows = params.lse + batch_head * params.seqlen_q + warp_m_begin;
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = r * 8 + lane / 4;
      if (row < valid_rows) lse_rows[row] = lse[r];
    }
  }
}

}  // namespace flash::sm80
