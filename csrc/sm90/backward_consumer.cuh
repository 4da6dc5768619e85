// What the consumers of Hopper backwards up to head dim 128 share: what comes before and behind the
// steps of a tile, and where dS goes.
#pragma once

#include <cstdint>

#include "common/warp.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// Where the warp's part of dS goes, as rows of queries, in bytes: stmatrix takes from each lane the
// address of a row of an 8 x 8 matrix, of matrix lane / 8.
template <int kBlockM>
__device__ uint32_t place_of_ds(int warpgroup, int warp, int lane) {
  const uint32_t row = (lane / 16 * 8 + lane % 8) * kPartRowBytes;
  const uint32_t chunk = ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  return warpgroup * kBlockM * kPartRowBytes + row + chunk;
}

// By a consumer warpgroup, tile after tile. take_steps(tile, range, first step, whether there is
// one, k, v, dk, dv) adds to dK and dV of its 64 keys; k, v: shared memory
template <typename Config, typename TakeSteps>
__device__ void consume_tiles(const BackwardParams& params, const BackwardSchedule& schedule,
                              typename Config::SharedStorage& shared, int warpgroup, int warp,
                              int lane, TakeSteps take_steps) {
  TilePipeline<Tile>::State tile_state;
  PipelineState<Config::kKvStages> kv_state;
  for (;;) {
    // It stays where it is, and is read again instead of occupying registers.
    const Tile& tile = shared.tiles.look(tile_state);
    if (warp_uniform(tile.batch) < 0) return;
    const KeyTileRange<Config> range(params, schedule, tile);
    const StepIterator step = range.steps(params, schedule, tile);
    const bool has_steps = warp_uniform_condition(step.left > 0);
    float dk[1][Config::kHeadDim / 8][4] = {}, dv[1][Config::kHeadDimV / 8][4] = {};
    ptx::wait_for_earlier_kernels();
    if (has_steps) {
      shared.k_pipeline.wait_full(kv_state);
      shared.v_pipeline.wait_full(kv_state);
    }
    const int stage = warp_uniform(kv_state.stage());
    take_steps(tile, range, step, has_steps, shared.k[stage], shared.v[stage], dk, dv);
    if (has_steps) {
      shared.k_pipeline.release(kv_state, lane);
      shared.v_pipeline.release(kv_state, lane);
      kv_state.advance();
    }
    const int group = warpgroup * 4 + warp;
    finish_gradient<Config, false>(params, schedule, tile, range.n_block, group, dk, lane);
    finish_gradient<Config, true>(params, schedule, tile, range.n_block, group, dv, lane);
    shared.tiles.release(tile_state, lane);
    tile_state.advance();
  }
}

}  // namespace flash::sm90
