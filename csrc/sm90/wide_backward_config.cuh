// What a Hopper backward of wide heads (192, 256) has: warps, registers, shared memory.
#pragma once

#include <cstdint>

#include "params.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

template <typename T_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures>
struct WideBackwardConfig {
  using T = T_;
  static constexpr bool kFull = kFeatures == FeatureSet::kFull;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kCluster = 2;  // thread blocks
  static constexpr int kBlockM = 64;
  static constexpr int kKeyRows = 64;                  // of a thread block
  static constexpr int kBlockN = kKeyRows * kCluster;  // of a tile
  // In shared memory: of Q, of dO, of P.
  static constexpr int kStages = 2, kDoutStages = kHeadDimV > 192 ? 1 : 2, kPStages = 2;

  static constexpr int kWarps = 4;  // of a role
  static constexpr int kThreads = 4 * kWarpgroup;
  static constexpr int kTileWarps = 3 * kWarps + 2;  // of a thread block, that look at each tile
  // Registers of a thread.
  static constexpr int kGradientRegisters = 208, kDqRegisters = 64, kHelperRegisters = 32;
  static_assert(2 * kGradientRegisters + kDqRegisters + kHelperRegisters <= 512);

  // Steps of K and V in registers, as operands of S^T and dP^T, where there is room.
  static constexpr int kKSteps = kHeadDim <= 192 && !kFull ? 8 : 0;
  static constexpr int kVSteps = kHeadDimV > 128 ? kKSteps : 0;

  // Of dQ a thread block computes at most 128 columns, in chunks: see dq_chunks.
  static constexpr int kDqCols = 128, kDqChunkCols = 64;
  static constexpr int kDqStages = kHeadDimV > 192 ? 1 : 2;
  static constexpr int kDqFullBarriers = 2 * kDqCols / kDqChunkCols;  // see backward_config.cuh
  static constexpr bool kWritesDq = false, kHasIdleWarps = false, kTransposesDq = false;
  static constexpr int kDqSize = kBlockM * kHeadDim;  // of a row tile of the workspace
  static constexpr int kDqTurns = kCluster;           // of each row tile
  static constexpr int kDqPieces = 1;
  static_assert(kHeadDim > kDqCols && kHeadDim <= kCluster * kDqCols);

  static constexpr int kStepSlots = 8;
  static constexpr int kDsPartSize = kBlockM * kKeyRows;

  struct SharedStorage {
    alignas(1024) T k[kTileSize<T, kKeyRows, kHeadDim>];
    alignas(1024) T v[kTileSize<T, kKeyRows, kHeadDimV>];
    alignas(1024) T peer_k[kTileSize<T, kKeyRows, kDqCols>];  // the columns that dQ needs
    alignas(1024) T q[kStages][kTileSize<T, kBlockM, kHeadDim>];
    alignas(1024) T dout[kDoutStages][kTileSize<T, kBlockM, kHeadDimV>];
    alignas(1024) T ds[kCluster][kDsPartSize];      // (keys of each thread block, queries, keys)
    alignas(128) uint4 p[kPStages][4][kWarpgroup];  // as the threads hold it
    alignas(128) float4 dq[kDqStages][kBlockM * kDqChunkCols / 4];
    alignas(16) float statistics[kStages][2 * kBlockM];
    StepBoard<kStepSlots> steps;
    Pipeline<1> k_pipeline, v_pipeline, peer_k_pipeline;
    Pipeline<kStages> q_pipeline;
    Pipeline<kDoutStages> dout_pipeline;
    Pipeline<kPStages> p_pipeline;
    Pipeline<kDqStages, kDqFullBarriers> dq_pipeline;
    uint64_t ds_full;       // this thread block's part of dS
    uint64_t peer_ds_full;  // the other's
    uint64_t ds_empty;      // both thread blocks have read both parts
    uint64_t tail_full[kTails];
    TilePipeline<Tile> tiles;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash::sm90
