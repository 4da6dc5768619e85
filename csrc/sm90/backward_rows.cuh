// Row tiles of the Hopper backward, and what it does for each query before its main kernel.
#pragma once

#include <climits>
#include <cmath>

#include "common/gaps.h"
#include "common/mask.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/sequence_tiles.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "sm90/idle_warps.cuh"

namespace flash::sm90 {

// Row tiles of the workspaces that come before those of a sequence, or of a packed row.
template <int kRows>
__device__ int dq_tile(const AttentionParams& params, const Sequence& sequence, int batch) {
  return params.cu_seqlens_q == nullptr ? batch * ((params.seqlen_q + kRows - 1) / kRows)
                                        : sequence.q_first / kRows + batch;
}

// A row tile of one head: kRows queries. The last come first: the main kernel, which begins with
// the first heads, finds in the L2 cache what has been written last; the end kernel the same of it.
template <int kRows>
struct RowTile {
  int head, part;  // part: the thread block's
  SequenceTiles::Place found;
  int first_row;
  Sequence sequence;
  int64_t place;  // in the workspaces

  // Of the last tiles.count() * parts * nheads thread blocks of a grid in one dimension.
  __device__ RowTile(const BackwardParams& params, const SequenceTiles& tiles, int parts = 1)
      : RowTile(params, tiles, gridDim.x - 1 - blockIdx.x, parts) {}

  __device__ bool empty() const { return first_row < 0 || first_row >= sequence.seqlen_q; }
  // Of dense sequences, in the order of IdleWork.
  __device__ int number(const BackwardParams& params) const {
    return (found.sequence * params.nheads + head) * ((params.seqlen_q + kRows - 1) / kRows) +
           found.block;
  }

 private:
  __device__ RowTile(const BackwardParams& params, const SequenceTiles& tiles, int block, int parts)
      : head(block % params.nheads),
        part(block / params.nheads % parts),
        found(tiles.find(block / params.nheads / parts)),
        first_row(found.block * kRows),
        sequence(params, found.sequence),
        place(int64_t{head} * params.row_tiles + dq_tile<kRows>(params, sequence, found.sequence) +
              found.block) {}
};

// Whether some of the queries sees some key.
template <typename Config>
__device__ bool sees_keys(const BackwardParams& params, const RowTile<Config::kBlockM>& tile) {
  const Sequence& sequence = tile.sequence;
  const Mask mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
                  params.window_right};
  const int end = min(tile.first_row + Config::kBlockM, sequence.seqlen_q);
  return !key_blocks<Config::kBlockN>(mask, tile.first_row, end).empty();
}

// Of backward_rows_kernel: a row tile is divided among kParts thread blocks. Small ones, so that an
// SM holds many and always has loads under way.
template <typename Config>
struct RowsConfig {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = Config::kHeadDimV <= 64    ? 8
                                : Config::kHeadDimV <= 128 ? 16
                                                           : 32;  // of a row
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kTimes = Config::kBlockM % (2 * kRowsAtOnce) == 0 ? 2 : 1;
  static constexpr int kRows = kRowsAtOnce * kTimes;
  static constexpr int kParts = Config::kBlockM / kRows;
  static_assert(Config::kBlockM % kRows == 0);
};

// delta = rowsum(dO * O) - dlse. Of each row it writes the statistics that the main kernel loads,
// (2, rows of a tile): the log-sum-exp in units of log 2, +inf where P is to be 0, then delta. And
// it clears the first `cleared` row tiles of the workspace of dQ, none if tiles add in order. If
// the main kernel writes dQ, it clears none of the workspace, but dQ of queries that see no key.
// Packed tiles are all of the workspaces'; empty ones are written as rows that see nothing. Grid:
// (tiles * kParts * nheads) clearing: the first so many thread blocks clear the rows of no sequence
// in the results
template <typename Config>
__global__ void __launch_bounds__(RowsConfig<Config>::kThreads, 5)
    backward_rows_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ SequenceTiles tiles, bool lengths_on_device,
                         bool writes_dq, int clearing, int cleared) {
  using T = typename Config::T;
  using Rows = RowsConfig<Config>;
  constexpr int kLanes = Rows::kLanes, kTimes = Rows::kTimes;
  // What follows from the parameters alone is found while earlier kernels end.
  if (lengths_on_device) {
    ptx::wait_for_earlier_kernels();
    if (blockIdx.x < clearing && threadIdx.x < 32) {
      clear_gaps<T>(params, blockIdx.x, clearing, threadIdx.x);
    }
  }
  const RowTile<Config::kBlockM> tile(params, tiles, Rows::kParts);
  const Sequence& sequence = tile.sequence;
  const int first_row = tile.first_row + tile.part * Rows::kRows;
  const int lane_row = first_row + threadIdx.x / kLanes;  // the first of the lane's
  const int col = threadIdx.x % kLanes * 8;
  const T* dout =
      rows_of<const T>(params.dout, sequence.q_batch, sequence.q_first + lane_row, tile.head) + col;
  const T* out =
      rows_of<const T>(params.out, sequence.q_batch, sequence.q_first + lane_row, tile.head) + col;
  const int64_t place = sequence.q_batch * params.lse_batch_stride +
                        tile.head * params.lse_head_stride + sequence.q_first + lane_row;
  const int64_t dout_step = Rows::kRowsAtOnce * params.dout.row_stride;
  const int64_t out_step = Rows::kRowsAtOnce * params.out.row_stride;
  constexpr int kChunks = Config::kDqSize / 4 / Rows::kParts;
  auto* const accum = reinterpret_cast<float4*>(params.dq_accum) +
                      (tile.place * Rows::kParts + tile.part) * kChunks + threadIdx.x;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (tile.empty() && !tiles.packed()) return;
  const int end = tile.empty() ? INT_MIN : sequence.seqlen_q;  // rows from here on are none

  uint4 dout_chunks[kTimes], out_chunks[kTimes];
  float lse[kTimes], dlse[kTimes];
#pragma unroll
  for (int i = 0; i < kTimes; ++i, dout += dout_step, out += out_step) {
    dout_chunks[i] = out_chunks[i] = make_uint4(0, 0, 0, 0);
    lse[i] = -INFINITY, dlse[i] = 0.f;
    if (lane_row + i * Rows::kRowsAtOnce >= end) continue;
    if (col < params.headdim_v) {
      dout_chunks[i] = *reinterpret_cast<const uint4*>(dout);
      out_chunks[i] = __ldcs(reinterpret_cast<const uint4*>(out));
    }
    if (col == 0) {
      const int64_t at = place + i * Rows::kRowsAtOnce;
      lse[i] = params.lse[at];
      if (params.dlse != nullptr) dlse[i] = params.dlse[at];
    }
  }
  if (!writes_dq && params.dq_turn == nullptr &&
      (params.dq_progress == nullptr || tile.number(params) < cleared)) {
    static_assert(kChunks % Rows::kThreads == 0);
#pragma unroll
    for (int i = 0; i < kChunks; i += Rows::kThreads) accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (params.dq_progress != nullptr && tile.part == 0 && threadIdx.x == 0) {
    const DqProgress progress(params);
    *progress.rounded(tile.place) = 0;
    const int group = params.nheads / params.nheads_kv;
    if (tile.first_row == 0 && tile.head % group == 0) {
      const int head = tile.found.sequence * params.nheads_kv + tile.head / group;
      *progress.added(head) = *progress.cleared(head) = 0;
      if (head == 0) *progress.clearing() = *progress.rounding() = 0;
    }
  }
  if (params.dq_turn != nullptr && tile.part == 0 && threadIdx.x < Config::kDqTurns) {
    params.dq_turn[tile.place * Config::kDqTurns + threadIdx.x] = 0;
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum += static_cast<float>(reinterpret_cast<const T*>(&dout_chunks[i])[j]) *
             static_cast<float>(reinterpret_cast<const T*>(&out_chunks[i])[j]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (col != 0) continue;
    const int row = lane_row + i * Rows::kRowsAtOnce;
    const float delta = lse[i] == -INFINITY ? 0.f : sum - dlse[i];  // of no key: whatever arrives
    if (row < end) params.delta[place + i * Rows::kRowsAtOnce] = delta;
    // A row without a visible key has a log-sum-exp of -inf, a probability nowhere.
    float* const statistics =
        params.row_statistics + tile.place * (2 * Config::kBlockM) + row - tile.first_row;
    statistics[0] = lse[i] == -INFINITY ? INFINITY : lse[i] * kLog2e;
    statistics[Config::kBlockM] = Config::kFull ? delta * params.delta_scale : delta;
  }
  if (Config::kWritesDq && writes_dq) {
    const int chunks = sees_keys<Config>(params, tile) ? 0 : params.headdim / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < Rows::kRows * chunks; i += Rows::kThreads) {
      const int row = first_row + i / chunks;
      if (row >= end) break;
      T* const target = rows_of<T>(params.dq, sequence.q_batch, sequence.q_first + row, tile.head);
      reinterpret_cast<uint4*>(target)[i % chunks] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace flash::sm90
