// What the Hopper backward does behind its main kernel, in one launch: it adds up the parts of
// divided tiles, and rounds dQ.
#pragma once

#include "common/pack.h"
#include "common/parts.h"
#include "common/sequence.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/movmatrix.h"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_rows.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/idle_warps.cuh"
#include "sm90/store.cuh"

namespace flash::sm90 {

constexpr int kPartCols = 32;  // that a warp adds up

// A thread block takes a row tile of dQ, or kKeys keys of a divided tile and kPartCols columns of
// dK or of dV. A warp takes 16 rows.
template <typename Config>
struct EndConfig {
  static constexpr int kThreads = Config::kBlockM * 2;
  // Keys of a thread block. Where row tiles do not divide a tile, some warps have none.
  static constexpr int kKeys = Config::kBlockN % Config::kBlockM == 0 ? Config::kBlockM : 64;
  static constexpr int kCols = (Config::kHeadDim + Config::kHeadDimV) / kPartCols;
  static constexpr int kBlocks = Config::kBlockN / kKeys * kCols;  // thread blocks of a tile
  static_assert(Config::kBlockN % kKeys == 0 && kKeys <= Config::kBlockM);
};

// dK and dV of a divided tile: the sum of its parts, always in the same order.
// number: of the tile among those that are divided; block: of those of this tile
template <typename Config>
__device__ void add_parts(const BackwardParams& params, const BackwardSchedule& schedule,
                          int number, int block, int warp, int lane) {
  using End = EndConfig<Config>;
  using Layout = PartLayout<Config>;
  if (warp * 16 >= End::kKeys) return;
  const Tile tile = divided_key_tile(schedule, number);
  if (tile.parts == 1) return;
  const KeyTileRange<Config> range(params, schedule, tile);
  const int group = block / End::kCols * (End::kKeys / 16) + warp;
  const int col = block % End::kCols * kPartCols, key = range.n_begin + group * 16;
  const float4* const part = Layout::place(params, schedule, tile, group) + col / 8 * 32;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (range.n_begin < 0 || range.n_begin >= range.sequence.seqlen_k) return;
  // So many are on their way at a time; behind the last one, that one again, which is not added.
  constexpr int kAtOnce = 4;
  float x[1][kPartCols / 8][4] = {};
#pragma unroll 1
  for (int i = 0; i < tile.parts; i += kAtOnce) {
    float4 y[kAtOnce][kPartCols / 8];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float4* const source = part + min(i + j, tile.parts - 1) * Layout::kPartSize + lane;
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) y[j][n] = __ldcg(source + n * 32);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const bool is_one = i + j < tile.parts;
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) {
        x[0][n][0] += is_one ? y[j][n].x : 0, x[0][n][1] += is_one ? y[j][n].y : 0;
        x[0][n][2] += is_one ? y[j][n].z : 0, x[0][n][3] += is_one ? y[j][n].w : 0;
      }
    }
  }
  if (col < Config::kHeadDim) {
    store_gradient<Config, false>(params, tile.batch, tile.head_kv, key, col, x, lane);
  } else {
    store_gradient<Config, true>(params, tile.batch, tile.head_kv, key, col - Config::kHeadDim, x,
                                 lane);
  }
}

// Rounds 8 rows of dQ^T, and writes them.
// row: the lane's, or null: not written; accum: accumulators (16 columns of dQ, 32 lanes)
template <typename T, int kHeadDim>
__device__ void round_transposed(T* row, int cols, const float4* accum, float scale, bool zero,
                                 int lane) {
  float4 all[kHeadDim / 16];
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n) all[n] = accum[n * 32 + lane];
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; n += 2) {
    alignas(16) uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = zero ? make_float4(0.f, 0.f, 0.f, 0.f) : all[n + i];
      words[2 * i] = ptx::transpose(pack(x.x * scale, x.y * scale, T()));
      words[2 * i + 1] = ptx::transpose(pack(x.z * scale, x.w * scale, T()));
    }
    store_words(row, n * 16, cols, words, lane);
  }
}

// dQ = gradient_scale * the workspace, rounded to T, where idle warps have not done it.
template <typename Config>
__device__ void round_dq(const BackwardParams& params, const RowTile<Config::kBlockM>& tile,
                         int warp, int lane) {
  using T = typename Config::T;
  constexpr int kRows = Config::kBlockM, kHeadDim = Config::kHeadDim;
  const Sequence& sequence = tile.sequence;
  const float4* const accum =
      reinterpret_cast<const float4*>(params.dq_accum) + tile.place * (kRows * kHeadDim / 4);
  T* targets[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.first_row + warp * 16 + half * 8 + lane / 4;
    targets[half] = row < sequence.seqlen_q
                        ? rows_of<T>(params.dq, sequence.q_batch, sequence.q_first + row, tile.head)
                        : nullptr;
  }
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (tile.empty()) return;
  if (params.dq_progress != nullptr && *DqProgress(params).rounded(tile.place) != 0) return;
  // In order, nobody has stored dQ of queries that see no key.
  const bool zero = params.dq_turn != nullptr && params.dq_turn[tile.place * Config::kDqTurns] == 0;
  if constexpr (Config::kTransposesDq) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      round_transposed<T, kHeadDim>(targets[half], params.headdim,
                                    accum + (warp * 2 + half) * (kHeadDim * 2),
                                    params.gradient_scale, zero, lane);
    }
    return;
  }
  constexpr int kChunkTiles = Config::kDqChunkCols / 8;
  constexpr int kCols = kHeadDim <= 128 ? kHeadDim : kHeadDim / 2;  // at once
#pragma unroll
  for (int col = 0; col < kHeadDim; col += kCols) {
    float dq[kCols / 8][4];
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const int tile = col / 8 + n;
      float4 x = accum[(tile / kChunkTiles * (kRows / 16) + warp) * (kChunkTiles * 32) +
                       tile % kChunkTiles * 32 + lane];
      if (zero) x = make_float4(0.f, 0.f, 0.f, 0.f);
      dq[n][0] = x.x * params.gradient_scale, dq[n][1] = x.y * params.gradient_scale;
      dq[n][2] = x.z * params.gradient_scale, dq[n][3] = x.w * params.gradient_scale;
    }
    T* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = targets[half] == nullptr ? nullptr : targets[half] + col;
    }
    store_accumulators<T, 4>(rows, params.headdim - col, dq, lane);
  }
}

// Grid: (part_blocks + tiles * nheads), without the latter if the main kernel writes dQ.
// part_blocks: thread blocks that add parts, none without kAddsParts
// When it starts the rows kernel has ended, and with it what has written lengths: they may be read
// in front of the wait.
// To fit more thread blocks on an SM, the compiler would have few loads of a thread under way.
template <typename Config, bool kAddsParts>
__global__ void __launch_bounds__(EndConfig<Config>::kThreads,
                                  (kAddsParts || Config::kHeadDim > 128 ? 512 : 1024) /
                                      EndConfig<Config>::kThreads)
    backward_end_kernel(const __grid_constant__ BackwardParams params,
                        const __grid_constant__ BackwardSchedule schedule,
                        const __grid_constant__ SequenceTiles tiles, int part_blocks) {
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int block = blockIdx.x;
  if (kAddsParts && block < part_blocks) {
    constexpr int kBlocks = EndConfig<Config>::kBlocks;
    add_parts<Config>(params, schedule, block / kBlocks, block % kBlocks, warp, lane);
  } else {
    round_dq<Config>(params, RowTile<Config::kBlockM>(params, tiles), warp, lane);
  }
}

}  // namespace flash::sm90
