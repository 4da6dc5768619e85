// Shared memory of a thread block of the Hopper backward up to head dim 128.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sm90/backward_tiles.cuh"
#include "sm90/idle_warps.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

struct NoIdleWarps {};

template <typename Config>
struct BackwardStorage {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages, kKvStages = Config::kKvStages;
  static constexpr int kDsStages = Config::kDsStages, kDqStages = Config::kDqStages;

  alignas(1024) T k[kKvStages][kTileSize<T, kBlockN, kHeadDim>];
  alignas(1024) T v[kKvStages][kTileSize<T, kBlockN, kHeadDimV>];
  alignas(1024) T q[kStages][kTileSize<T, kBlockM, kHeadDim>];
  alignas(1024) T dout[kStages][kTileSize<T, kBlockM, kHeadDimV>];
  alignas(1024) T ds[kDsStages][kTileSize<T, kBlockM, kBlockN>];
  alignas(128) float4 dq[kDqStages][Config::kDqSize / 4];  // as in the workspace
  alignas(16) float statistics[kStages][2 * kBlockM];
  StepQueries step_queries[Config::kStepSlots];
  Pipeline<kKvStages> k_pipeline, v_pipeline;
  Pipeline<kStages> q_pipeline, dout_pipeline;
  Pipeline<kDsStages> ds_pipeline;
  Pipeline<kDqStages, Config::kDqFullBarriers> dq_pipeline;
  TilePipeline<Tile> tiles;
  StepBoard<Config::kStepSlots> steps;
  uint64_t tail_full[kTails];
  // The last: see shared_bytes.
  std::conditional_t<Config::kHasIdleWarps, IdleWarps<kHeadDim>, NoIdleWarps> idle;
};

}  // namespace flash::sm90
