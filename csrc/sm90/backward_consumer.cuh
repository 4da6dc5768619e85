// What the consumers of Hopper backwards up to head dim 128 share: what comes before and behind the
// steps of a tile, and where dS goes.
#pragma once

#include <cstdint>

#include "common/warp.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/named_barrier.h"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/tma_store.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// Where the warp's part of dS goes, as rows of queries, in bytes: stmatrix takes from each lane the
// address of a row of an 8 x 8 matrix, of matrix lane / 8.
template <int kBlockM>
__device__ uint32_t place_of_ds(int warpgroup, int warp, int lane) {
  const uint32_t row = (lane / 16 * 8 + lane % 8) * kPartRowBytes;
  const uint32_t chunk = ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  return keep(warpgroup * kBlockM * kPartRowBytes + row + chunk);
}

constexpr int kNoLane = 32;       // where no lane shall arrive
constexpr int kAllConsumers = 1;  // a named barrier

// By a consumer warpgroup, tile after tile. take_steps(tile, range, first step, whether there is
// one, k, v, dk, dv, steps so far) adds to dK and dV of its 64 keys, and releases Q and dO; if
// dK goes there, not those of the last step. k, v: shared memory
template <typename Config, typename TakeSteps>
__device__ void consume_tiles(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardSchedule& schedule,
                              typename Config::SharedStorage& shared, int warpgroup, int warp,
                              int lane, TakeSteps take_steps) {
  using T = typename Config::T;
  constexpr bool kInKeys = Config::kGradientsInKeys;
  constexpr int kStageOfDk = kTileSize<T, kWarpRows, Config::kHeadDim>;  // of a warp
  constexpr int kStageOfDv = kTileSize<T, kWarpRows, Config::kHeadDimV>;
  static_assert(kInKeys || (4 * sizeof(T) * kStageOfDk <= sizeof(shared.q[0]) &&
                            4 * sizeof(T) * kStageOfDk <= sizeof(shared.dout[0]) &&
                            8 * sizeof(T) * kStageOfDv <= sizeof(shared.ds)));
  const int group = warpgroup * 4 + warp;  // of 16 keys
  TilePipeline<Tile>::State tile_state;
  PipelineState<Config::kKvStages> kv_state;
  uint32_t step_count = 0;
  bool holds = false;  // what dK and dV of the tile before went to is not released
  const auto wait_for_consumers = [] {
    ptx::bar_sync(kAllConsumers, Config::kConsumers * kWarpgroup);
  };
  const auto release_keys = [&] {
    shared.k_pipeline.release(kv_state, lane);
    shared.v_pipeline.release(kv_state, lane);
    kv_state.advance();
  };
  for (;;) {
    // It stays where it is, and is read again instead of occupying registers.
    const Tile& tile = shared.tiles.look(tile_state);
    if (warp_uniform(tile.batch) < 0) break;
    const KeyTileRange<Config> range(params, schedule, tile);
    const StepIterator step = range.steps(params, schedule, tile);
    const bool has_steps = warp_uniform_condition(step.left > 0);
    float dk[1][Config::kHeadDim / 8][4] = {}, dv[1][Config::kHeadDimV / 8][4] = {};
    ptx::wait_for_earlier_kernels();
    if (holds) {
      wait_for_stores_of_warp();
      if constexpr (kInKeys) {
        release_keys();
      } else {
        const PipelineState<Config::kStages> last{step_count - 1};
        shared.q_pipeline.release(last, lane);
        shared.dout_pipeline.release(last, lane);
        wait_for_consumers();  // the place of dS is free
      }
    }
    holds = has_steps;
    if (has_steps) {
      shared.k_pipeline.wait_full(kv_state);
      shared.v_pipeline.wait_full(kv_state);
    }
    const int stage = warp_uniform(kv_state.stage());
    T* const k = shared.k[stage];
    T* const v = shared.v[stage];
    take_steps(tile, range, step, has_steps, k, v, dk, dv, step_count);
    if (has_steps && !kInKeys) release_keys();
    if (has_steps && tile.parts == 1) {
      wait_for_consumers();  // all have read what dK and dV overwrite
      const int key = range.n_begin + group * kWarpRows, last = (step_count - 1) % Config::kStages;
      T* const query_stage = warpgroup == 0 ? shared.q[last] : shared.dout[last];
      send_gradient<Config, true>(params, maps, schedule, range.sequence, tile.head_kv, key,
                                  (kInKeys ? v : shared.ds[0]) + group * kStageOfDv, dv, lane);
      send_gradient<Config, false>(
          params, maps, schedule, range.sequence, tile.head_kv, key,
          kInKeys ? k + group * kStageOfDk : query_stage + warp * kStageOfDk, dk, lane);
    } else {
      finish_gradient<Config, false>(params, schedule, tile, range.n_block, group, dk, lane);
      finish_gradient<Config, true>(params, schedule, tile, range.n_block, group, dv, lane);
    }
    shared.tiles.release(tile_state, lane);
    tile_state.advance();
  }
  wait_for_stores_of_warp();
}

}  // namespace flash::sm90
