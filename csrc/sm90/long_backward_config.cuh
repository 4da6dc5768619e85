// What the Hopper backward of long sequences without a mask has: steps of 80 queries instead of 64,
// so that the products read K and V from shared memory 4/5 times as often. There is no room for
// idle warps beside them.
#pragma once

#include "params.h"
#include "sm90/backward_storage.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

template <typename T_>
struct LongBackwardConfig {
  using T = T_;
  static constexpr bool kFull = false;
  static constexpr int kHeadDim = 128, kHeadDimV = kHeadDim;
  static constexpr int kBlockM = 80, kBlockN = 128;
  static constexpr int kStages = 2, kKvStages = 1, kDsStages = 2;

  static constexpr int kCluster = 1;                           // thread blocks
  static constexpr int kKeyRows = kBlockN;                     // of a thread block
  static constexpr int kConsumers = kBlockN / kWarpgroupRows;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static constexpr bool kWritesDq = false, kHasIdleWarps = false;
  // Consumers compute dQ^T: each has 64 rows, which are columns of dQ.
  static constexpr bool kTransposesDq = true;
  static_assert(kConsumers * kWarpgroupRows == kHeadDim);
  static constexpr int kDqSize = kBlockM * kHeadDim;  // of a row tile of the workspace
  static constexpr int kDqStages = 1, kDqFullBarriers = 2, kDqChunkCols = kHeadDim, kDqTurns = 1;
  static constexpr int kDqPieces = 1;
  static constexpr bool kGradientsInKeys = false, kKeysBehindQ = false;

  static constexpr int kStepSlots = 4;

  using SharedStorage = BackwardStorage<LongBackwardConfig>;
};

}  // namespace flash::sm90
