// Tile shapes and shared memory of the Hopper forward.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

struct ForwardTile {
  int block_m;   // queries of a tile: 64 for each consumer warpgroup; 0: there is no such tile
  int block_n;   // keys of one step
  int stages;    // of K and of V in shared memory
  int q_stages;  // of Q; 2: the next tile's is loaded beside this one's
  // Microseconds on an H200: of what comes before and after the steps of a tile, and of a step.
  // They are for the choice between tiles (forward_plan.h).
  float ends, step;
  int streams = 1;          // of tiles, that a thread block works on at the same time
  float shared_step = 0.f;  // of a step, if two do
};

constexpr ForwardTile forward_tile(int headdim, int headdim_v, FeatureSet features, int choice) {
  const bool plain = features == FeatureSet::kPlain;  // the full set needs more registers
  switch (headdim) {
    case 64:
      if (choice == 0) return {128, 64, 4, 2, 1.86f, 0.28f, 2, 0.93f};
      if (choice == 1 && plain) return {128, 128, 2, 2, 1.26f, 1.15f};
      if (choice == 2 && plain) return {192, 128, 2, 2, 1.39f, 1.33f};
      break;
    case 96:
      if (!plain && choice == 0) return {128, 96, 2, 2, 1.34f, 0.89f};
      if (!plain) break;
      if (choice == 0) return {128, 48, 3, 1, 1.70f, 0.37f, 2, 0.85f};
      if (choice == 1) return {192, 96, 2, 1, 2.00f, 1.05f};
      if (choice == 2) return {128, 96, 2, 2, 1.34f, 0.89f};
      break;
    case 128:
      if (choice == 0) return {128, 128, 2, 2, 1.89f, 1.29f};
      if (choice == 1 && plain) return {192, 64, 3, 2, 1.55f, 0.93f};
      if (choice == 2 && plain) return {128, 176, 2, 1, 2.26f, 1.75f};
      break;
    case 192:
      if (headdim_v == 128) {
        if (choice == 0)
          return plain ? ForwardTile{128, 64, 3, 2, 1.35f, 0.98f}
                       : ForwardTile{128, 128, 2, 1, 1.80f, 1.77f};
        if (choice == 1 && plain) return {128, 128, 2, 1, 1.80f, 1.77f};
      } else {
        if (choice == 0) return {128, 64, 2, 2, 1.59f, 1.09f};
        if (choice == 1) return {128, 96, 2, 1, 1.73f, 1.53f};
      }
      break;
    default:
      if (choice == 0) return {128, 64, 2, 1, 2.47f, 1.29f};
      if (choice == 1 && plain) return {128, 80, 2, 1, 1.84f, 1.63f};
      break;
  }
  return {};
}

constexpr int count_forward_tiles(int headdim, int headdim_v, FeatureSet features) {
  int count = 0;
  while (forward_tile(headdim, headdim_v, features, count).block_m > 0) ++count;
  return count;
}

template <typename T_, typename Out_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_,
          int kChoice>
struct ForwardConfig {
  using T = T_;      // of Q, K and V
  using Out = Out_;  // of the output
  static constexpr ForwardTile kTile = forward_tile(kHeadDim_, kHeadDimV_, kFeatures_, kChoice);
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kQStages = kTile.q_stages;

  static constexpr int kStreams = kTile.streams;

  static constexpr int kConsumers = kBlockM / kWarpgroupRows;  // warpgroups of a stream
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kReceivers = kStreams == 1 ? 2 : 0;  // of tiles, beside the consumers
  // One warpgroup more: the scheduler and two producers, or for each stream a warp that is all.
  static constexpr int kThreads = (kStreams * kConsumers + 1) * kWarpgroup;
  // Registers of a thread. All start with 65536 / kThreads, rounded down to a multiple of 8.
  static constexpr int kProducerRegisters = kStreams * kConsumers > 2 ? 32 : 40;
  static constexpr int kConsumerRegisters = kStreams == 2 ? 112 : kConsumers == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kStreams * kConsumers * kConsumerRegisters <=
                65536 / kThreads / 8 * 8 * (kStreams * kConsumers + 1));

  static_assert(kBlockM % kWarpgroupRows == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kBlockN % kWgmmaDepth<T> == 0 && kHeadDimV <= kHeadDim);

  struct SharedStorage {  // of a stream
    alignas(1024) T q[kQStages][kTileSize<T, kBlockM, kHeadDim>];
    alignas(1024) T k[kStages][kTileSize<T, kBlockN, kHeadDim>];
    alignas(1024) T v[kStages][kTileSize<T, kBlockN, kHeadDimV>];
    Pipeline<kQStages> q_pipeline;
    Pipeline<kStages> k_pipeline, v_pipeline;
    uint64_t tail_full;  // the last block of V, whose rows past the sequence are cleared first
    TilePipeline tiles;
    uint64_t tile_wanted;  // of one stream: all of the last tile's keys are on their way
  };
  static_assert(kStreams * sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash::sm90
