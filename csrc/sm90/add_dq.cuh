// Adds dQ of the steps to the float32 workspace, from shared memory.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "params.h"
#include "ptx/atomics.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"

namespace flash::sm90 {

// By one lane: it has TMA add `chunks` chunks of columns of each step, from first_chunk on. To be
// deterministic, the tiles that see some queries add in the order of their keys.
// steps: it ends after so many, or at a step without a row tile
// counter: which one of a row tile counts those that have added these columns
template <typename Config>
__device__ void add_dq(const BackwardParams& params, typename Config::SharedStorage& shared,
                       uint32_t steps, int first_chunk, int chunks, int counter) {
  constexpr int kChunkSize = Config::kBlockM * Config::kDqChunkCols;
  PipelineState<Config::kDqStages> state;
#pragma unroll 1
  for (uint32_t i = 0; i != steps; ++i) {
    shared.dq_pipeline.wait_full(state);
    const auto [row_tile, turn] = shared.steps[i % Config::kStepSlots];
    if (row_tile < 0) break;
    int* const turns = params.dq_turn == nullptr
                           ? nullptr
                           : params.dq_turn + row_tile * Config::kDqTurns + counter;
    if (turns != nullptr) {
      // Less than, not unequal: if bad cu_seqlens make sequences share counters, nothing waits
      // forever.
      while (ptx::load_acquire(turns) < turn) {
      }
      cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
    }
    float* const target =
        params.dq_accum + int64_t{row_tile} * Config::kDqSize + first_chunk * kChunkSize;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, state.advance()) {
      shared.dq_pipeline.wait_full(state);
      cuda::ptx::cp_reduce_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared,
                                      cuda::ptx::op_add, target + chunk * kChunkSize,
                                      reinterpret_cast<const float*>(shared.dq[state.stage()]),
                                      sizeof(shared.dq[0]));
      cuda::ptx::cp_async_bulk_commit_group();
      cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>());
      arrive(shared.dq_pipeline.empty[state.stage()]);
    }
    if (turns != nullptr) {
      cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
      __threadfence();
      ptx::red_release_increment(turns);
    }
  }
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
}

}  // namespace flash::sm90
