// What a Hopper backward has: warps, registers, shared memory.
#pragma once

#include "params.h"
#include "sm90/backward_storage.cuh"
#include "sm90/backward_tile.h"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

template <typename T_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures>
struct BackwardConfig {
  using T = T_;
  static constexpr BackwardTile kTile = backward_tile(kHeadDim_);
  static constexpr bool kFull = kFeatures == FeatureSet::kFull;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages, kKvStages = kTile.kv_stages;
  static constexpr int kDsStages = kTile.ds_stages;
  // dK and dV leave by way of the place of K and V, as the next tile has another for its own.
  // Else by way of those of dS, Q and dO.
  static constexpr bool kGradientsInKeys = kKvStages == 2;
  // Steps of K and V in registers. The full feature set has none left.
  static constexpr int kKSteps = kTile.k_in_registers && !kFull ? kHeadDim / kWgmmaDepth<T> : 0;
  static constexpr int kVSteps = kTile.v_in_registers && !kFull ? kHeadDimV / kWgmmaDepth<T> : 0;
  static constexpr int kHalves = kBlockM / kWarpgroupRows;
  // What a step begins with and is in registers from before. The full feature set has few left: it
  // keeps what was measured to be fastest.
  static constexpr bool kKeepsStage = !kFull || kHeadDim == 96;  // and the phase of its barriers
  static constexpr bool kKeepsKeys = !kFull || kHeadDim > 64;    // descriptors of K and V
  static constexpr bool kKeepsQueries = !kFull;                  // descriptors of Q and dO
  static constexpr bool kKeepsStatistics = !kFull || kHeadDim <= 64;  // the lane's first query

  static constexpr int kCluster = 1;                           // thread blocks
  static constexpr int kKeyRows = kBlockN;                     // of a thread block
  static constexpr int kConsumers = kBlockN / kWarpgroupRows;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  // dQ is divided among them: by its rows if there are as many halves, else by its columns, in
  // whole parts.
  static constexpr bool kDividesDqRows = kHalves == kConsumers;
  static constexpr int kDqCols = kDividesDqRows ? kHeadDim : 64;
  static_assert(kDividesDqRows || (kHalves == 1 && kHeadDim > 64 && kHeadDim <= 128));
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread. These producers spill with 24.
  static constexpr int kProducerRegisters = kHeadDim == 96 || (kFull && kHeadDim <= 64) ? 40 : 24;
  static constexpr int kConsumerRegisters = kProducerRegisters == 40 ? 232 : 240;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                65536 / kThreads / 8 * 8 * (kConsumers + 1));
  static_assert(kBlockM % kWarpgroupRows == 0 && kConsumers == 2);

  static constexpr bool kWritesDq = true;      // of lone tiles
  static constexpr bool kHasIdleWarps = true;  // see idle_warps.cuh
  static constexpr bool kTransposesDq = false;
  static constexpr int kDqSize = kBlockM * kHeadDim;  // of a row tile of the workspace
  static constexpr int kDqStages = 1;                 // in shared memory
  static constexpr int kDqFullBarriers = 2;           // two warps take every other step
  static constexpr int kDqChunkCols = kHeadDim;       // it is kept in chunks of columns
  static constexpr int kDqTurns = 1;  // of each row tile, if it is added to in order
  // By measurement: in how many pieces TMA brings dQ of a step to memory; and whether K and V are
  // loaded behind Q of the first step, instead of behind its dO.
  static constexpr int kDqPieces = kHeadDim == 96 ? 1 : 2;
  static constexpr bool kKeysBehindQ = kHeadDim == 96;

  static constexpr int kStepSlots = 4;

  using SharedStorage = BackwardStorage<BackwardConfig>;
};

}  // namespace flash::sm90
