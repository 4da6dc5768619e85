// How dQ of the steps gets from shared memory to its place: added to a float32 workspace, or
// written by a lone tile.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "common/range.h"
#include "params.h"
#include "ptx/atomics.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/store.cuh"

namespace flash::sm90 {

// Tells who is next that a row tile has been added to, by one lane. Nobody waits for that to be
// complete while there is something else to do; but before it waits for its own turn it tells, or
// two could wait for each other.
class TurnSignal {
 public:
  // Of all but the last kPending additions, which are of the next row tile.
  template <int kPending>
  __device__ void send() {
    if (turns_ == nullptr) return;
    cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<kPending>());
    ptx::red_release_increment(turns_);
    turns_ = nullptr;
  }
  __device__ void set(int* turns) { turns_ = turns; }

 private:
  int* turns_ = nullptr;
};

// The semaphore of a row tile: how many tiles have added to it, if they do that in turns; see
// KeyTileRange::turn. counter: which one of it counts those that have added these columns
template <typename Config>
__device__ int* turns_of(const BackwardParams& params, int row_tile, int counter) {
  return params.dq_turn + row_tile * Config::kDqTurns + counter;
}

// Waits for the turn of each step, by one lane: so that who adds need not ask memory.
template <typename Config>
__device__ void await_turns(const BackwardParams& params, typename Config::SharedStorage& shared,
                            int counter) {
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    const auto [row_tile, turn] = shared.steps.look(PipelineState<Config::kStepSlots>{i});
    if (row_tile < 0) return;
    const PipelineState<Config::kTurnStages> state{i};
    shared.turn_pipeline.wait_empty(state);
    // Less than, not unequal: if bad cu_seqlens make sequences share counters, nothing waits
    // forever.
    while (ptx::load_acquire(turns_of<Config>(params, row_tile, counter)) < turn) {
    }
    arrive(shared.turn_pipeline.full[state.stage()]);
  }
}

// By one lane: it has TMA add, of each step, the chunks of columns chunks_of(row tile); to be
// deterministic, in turns.
template <typename Config, typename ChunksOf>
__device__ void add_dq(const BackwardParams& params, typename Config::SharedStorage& shared,
                       ChunksOf chunks_of, int counter) {
  constexpr int kChunkSize = Config::kBlockM * Config::kDqChunkCols;
  PipelineState<Config::kDqStages> state;
  TurnSignal signal;
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    if (!shared.dq_pipeline.is_full(state)) signal.send<0>();
    const int row_tile = shared.steps.look(PipelineState<Config::kStepSlots>{i}).row_tile;
    if (row_tile < 0) break;
    int* turns = nullptr;
    if (params.dq_turn != nullptr) {
      turns = turns_of<Config>(params, row_tile, counter);
      const PipelineState<Config::kTurnStages> turn_state{i};
      if (!shared.turn_pipeline.is_full(turn_state)) signal.send<0>();
      shared.turn_pipeline.wait_full(turn_state);
      shared.turn_pipeline.release_alone(turn_state);
      cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
    }
    float* const target = params.dq_accum + int64_t{row_tile} * Config::kDqSize;
    const Range chunks = chunks_of(row_tile);
#pragma unroll 1
    for (int chunk = chunks.begin; chunk < chunks.end; ++chunk, state.advance()) {
      shared.dq_pipeline.wait_stored(state);
      cuda::ptx::cp_reduce_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared,
                                      cuda::ptx::op_add, target + chunk * kChunkSize,
                                      reinterpret_cast<const float*>(shared.dq[state.stage()]),
                                      sizeof(shared.dq[0]));
      cuda::ptx::cp_async_bulk_commit_group();
      cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>());
      shared.dq_pipeline.release_alone(state);
      signal.send<1>();
    }
    signal.set(turns);
  }
  signal.send<0>();
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
}

constexpr int kDqWriters = 2;  // warps

// dQ = softmax_scale * what is in shared memory, rounded to T: each writer takes every other 8
// rows. It ends at a step without a row tile.
template <typename Config>
__device__ void write_dq(const BackwardParams& params, typename Config::SharedStorage& shared,
                         int writer, int lane) {
  using T = typename Config::T;
  constexpr int kTiles = Config::kDqChunkCols / 8, kTilesAtOnce = 2;
  static_assert(Config::kDqChunkCols == Config::kHeadDim);
#pragma unroll 1
  for (PipelineState<Config::kDqStages> state;; state.advance()) {
    const PipelineState<Config::kStepSlots> slot{state.count};
    if (shared.steps.look(slot).row_tile < 0) return;
    const StepQueries& queries = shared.step_queries[slot.stage()];
    shared.dq_pipeline.wait_full(state);
    // Of the lane, in accumulators of 16 rows: its columns in the first 8 rows, then in the others.
    const float2* source =
        reinterpret_cast<const float2*>(shared.dq[state.stage()] + lane) + writer;
#pragma unroll 1
    for (int row = writer * 8 + lane / 4; row < Config::kBlockM; row += 16) {
      T* target = nullptr;
      if (row < queries.rows) {
        target = rows_of<T>(params.dq, queries.batch, queries.first_row + row, queries.head);
      }
#pragma unroll 1
      for (int n = 0; n < kTiles; n += kTilesAtOnce) {
        float out[kTilesAtOnce][4];
#pragma unroll
        for (int i = 0; i < kTilesAtOnce; ++i, source += 2 * 32) {
          out[i][0] = source->x * params.softmax_scale,
          out[i][1] = source->y * params.softmax_scale;
        }
        store_row<T, kTilesAtOnce>(target, params.headdim - n * 8, out, 0, lane);
        if (target != nullptr) target += kTilesAtOnce * 8;
      }
    }
    shared.dq_pipeline.release(state, lane);
  }
}

}  // namespace flash::sm90
