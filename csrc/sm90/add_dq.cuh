// How dQ of the steps gets from shared memory to its place: added to a float32 workspace, or
// written by a lone tile.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "common/mask.h"
#include "common/range.h"
#include "common/sequence.h"
#include "params.h"
#include "ptx/atomics.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/idle_warps.cuh"
#include "sm90/pipeline.cuh"

namespace flash::sm90 {

// Warps that add in order: while one waits until its addition is in memory, the other goes on.
constexpr int kOrderedAdders = 2;

// By one lane: has TMA add a chunk of dQ to what is at `target`, or store it there. In pieces: what
// the producer asks for meanwhile comes between them.
template <typename Config>
__device__ void send_dq(float* target, const float4* chunk, bool adds) {
  constexpr int kSize = Config::kBlockM * Config::kDqChunkCols / Config::kDqPieces;
  const auto* source = reinterpret_cast<const float*>(chunk);
#pragma unroll
  for (int i = 0; i < Config::kDqPieces; ++i, target += kSize, source += kSize) {
    if (adds) {
      cuda::ptx::cp_reduce_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared,
                                      cuda::ptx::op_add, target, source, sizeof(float) * kSize);
    } else {
      cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, target, source,
                               sizeof(float) * kSize);
    }
  }
  cuda::ptx::cp_async_bulk_commit_group();
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>());
}

// By one lane of each warp that adds: it has TMA add, of its steps, the chunks of columns
// chunks_of(row tile). To be deterministic, tiles add to a row tile in turns, which a semaphore
// counts: see KeyTileRange::turn. The first stores, so there nobody clears the workspace. It ends
// at a step without a row tile. adder: which of the warps it is; counter: the semaphore of these
// columns among a row tile's
template <typename Config, typename ChunksOf>
__device__ void add_dq(const BackwardParams& params, const BackwardSchedule& schedule,
                       typename Config::SharedStorage& shared, ChunksOf chunks_of, uint32_t adder,
                       int counter) {
  constexpr int kChunkSize = Config::kBlockM * Config::kDqChunkCols;
  const uint32_t adders = params.dq_turn == nullptr ? 1 : kOrderedAdders;
  if (adder >= adders) return;
  PipelineState<Config::kDqStages> state;
  int head = -1, added = 0;  // if idle warps wait: those that share K and V, and their steps so far
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    const auto [row_tile, turn, last] = shared.steps.look(PipelineState<Config::kStepSlots>{i});
    if (row_tile < 0) break;
    if constexpr (Config::kHasIdleWarps) {
      if (schedule.idle.head_steps > 0 && head < 0) {
        head = head_of_row_tile<Config::kBlockM>(params, row_tile);
        shared.idle.begin_head(params, schedule.idle, head);
      }
    }
    const Range chunks = chunks_of(row_tile);
    if (i % adders != adder) {
      state.count += chunks.end - chunks.begin;
    } else {
      int* turns = nullptr;
      if (params.dq_turn != nullptr) {
        turns = params.dq_turn + row_tile * Config::kDqTurns + counter;
        // Less than, not unequal: if bad cu_seqlens make sequences share counters, nothing waits
        // forever.
        while (ptx::load_acquire(turns) < turn) {
        }
        cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
      }
      const bool first = turns != nullptr && turn == 0;
      float* const target = params.dq_accum + int64_t{row_tile} * Config::kDqSize;
#pragma unroll 1
      for (int chunk = chunks.begin; chunk < chunks.end; ++chunk, state.advance()) {
        shared.dq_pipeline.wait_stored(state);
        send_dq<Config>(target + chunk * kChunkSize, shared.dq[state.stage()], !first);
        shared.dq_pipeline.release_alone(state);
      }
      if (turns != nullptr) {
        cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
        ptx::red_release_add(turns, 1);
      }
      ++added;
    }
    if constexpr (Config::kHasIdleWarps) {
      if (last && head >= 0) {
        shared.idle.end_head(params, head, added);
        head = -1, added = 0;
      }
    }
  }
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
}

// The sequence that these queries are of. See dq_tile.
template <int kBlockM>
__device__ int batch_of_row_tile(const BackwardParams& params, int row_tile,
                                 const StepQueries& queries) {
  return params.cu_seqlens_q == nullptr ? queries.batch
                                        : row_tile % params.row_tiles - queries.first_row / kBlockM;
}

// The same of whole heads, in a workspace of the thread block, `accum`: (row tiles of a head,
// elements of a row tile). The first tile stores; after the last one the idle warps round.
template <typename Config>
__device__ void add_dq_of_heads(const BackwardParams& params,
                                typename Config::SharedStorage& shared, float* accum) {
  constexpr int kBlockM = Config::kBlockM;
  const int blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const int group = params.nheads / params.nheads_kv;
  PipelineState<Config::kDqStages> state;
#pragma unroll 1
  for (uint32_t i = 0;; ++i, state.advance()) {
    const PipelineState<Config::kStepSlots> slot{i};
    const auto [row_tile, n_block, last] = shared.steps.look(slot);
    if (row_tile < 0) break;
    const StepQueries& queries = shared.step_queries[slot.stage()];
    const Sequence sequence(params, batch_of_row_tile<kBlockM>(params, row_tile, queries));
    const Mask mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
                    params.window_right};
    const int m_begin = queries.first_row - sequence.q_first;
    const Range tiles = key_blocks<Config::kBlockN>(mask, m_begin, m_begin + queries.rows);
    const bool first = n_block + 1 == tiles.end, complete = n_block == tiles.begin;
    const int place = queries.head % group * blocks + m_begin / kBlockM;
    if (first) shared.idle.wait_rounded(place);
    shared.dq_pipeline.wait_stored(state);
    send_dq<Config>(accum + place * Config::kDqSize, shared.dq[state.stage()], !first);
    shared.dq_pipeline.release_alone(state);
    cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
    if (complete) shared.idle.hand_over(place, queries);
  }
  shared.idle.end_heads();
}

constexpr int kDqWriters = 3;  // warps

// dQ = gradient_scale * what is in shared memory, rounded to T: writers take 8 rows in turn. It
// ends at a step without a row tile.
template <typename Config>
__device__ void write_dq(const BackwardParams& params, typename Config::SharedStorage& shared,
                         int writer, int lane) {
  using T = typename Config::T;
  constexpr int kTiles = Config::kDqChunkCols / 8;
  static_assert(Config::kDqChunkCols == Config::kHeadDim);
  const int first_row = writer * 8 + lane / 4;
#pragma unroll 1
  for (PipelineState<Config::kDqStages> state;; state.advance()) {
    const PipelineState<Config::kStepSlots> slot{state.count};
    if (shared.steps.look(slot).row_tile < 0) return;
    const StepQueries& queries = shared.step_queries[slot.stage()];
    int left = queries.rows - first_row;  // rows from the lane's on
    T* target = rows_of<T>(params.dq, queries.batch, queries.first_row + first_row, queries.head);
    shared.dq_pipeline.wait_full(state);
#pragma unroll 1
    for (int octet = writer; octet < Config::kBlockM / 8; octet += kDqWriters) {
      // Of the lane, in accumulators of 16 rows: its columns in the first 8 rows, then in the
      // others.
      const float2* const source = reinterpret_cast<const float2*>(shared.dq[state.stage()] +
                                                                   octet / 2 * kTiles * 32 + lane) +
                                   octet % 2;
      round_octet<T, kTiles>(target, source, params.gradient_scale, left > 0, params.headdim, lane);
      left -= kDqWriters * 8;
      target += kDqWriters * 8 * params.dq.row_stride;
    }
    shared.dq_pipeline.release(state, lane);
  }
}

}  // namespace flash::sm90
