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
  int block_m;      // queries of a tile: 64 for each consumer warpgroup
  int block_n;      // keys of one step
  int stages;       // of K and of V in shared memory
  int q_stages;     // of Q; 2: the next tile's is loaded beside this one's
  int streams = 1;  // of tiles, that a thread block works on at the same time
};

constexpr bool operator==(const ForwardTile& a, const ForwardTile& b) {
  return a.block_m == b.block_m && a.block_n == b.block_n && a.stages == b.stages &&
         a.q_stages == b.q_stages && a.streams == b.streams;
}

// 128 queries in two warpgroups, which leave registers for wide blocks of keys; for long sequences
// 192 in three where the output is narrow enough, which reads K and V less often. Where a tile
// needs few registers, two streams of tiles, which know nothing of each other: what one does at the
// ends of a tile, when its warps wait for each other, is hidden behind the other's. `is_long`:
// forward_launch.cuh. TFLOP/s on an H200 in bf16, 16384 tokens, full / causal, first of the tile
// for short sequences, then of the one for long; to be compared within one comment.
// docs/design-notes.md has more.
constexpr ForwardTile forward_tile(int headdim, int headdim_v, FeatureSet features, bool is_long) {
  const bool plain = features == FeatureSet::kPlain;  // the full set needs more registers
  switch (headdim) {
    case 64:
      // At 256 344 / 191, at 1024 511 / 391, at 16384 562 / 568. One stream, with 128 and from 2048
      // on 192 queries: 292 / 166, 474 / 320, 569 / 567.
      return {128, 64, 4, 2, 2};
    case 96:
      // At 512 445 / 269 and 430 / 270, at 1024 530 / 403 and 546 / 376, at 4096 601 / 577 and
      // 654 / 585.
      if (!plain) return {128, 96, 2, 2};
      return is_long ? ForwardTile{192, 96, 2, 1} : ForwardTile{128, 48, 3, 1, 2};
    case 128:
      // At 512 533 / 320 and 544 / 326, at 2048 648 / 546 and 704 / 582; with 128 queries 64, 96
      // and 112 keys are slower than 128.
      return is_long && plain ? ForwardTile{192, 64, 3, 2} : ForwardTile{128, 128, 2, 2};
    case 192:
      // At 512 523 / 336 and 552 / 329, at 2048 593 / 485 and 684 / 545; 192 queries are slower.
      if (headdim_v == 128) {
        return is_long || !plain ? ForwardTile{128, 128, 2, 1} : ForwardTile{128, 64, 3, 2};
      }
      // At 256 406 / 225 and 409 / 212, at 2048 547 / 560 and 568 / 570; 80 keys are as good as 96.
      return is_long ? ForwardTile{128, 96, 2, 1} : ForwardTile{128, 64, 2, 2};
    default:
      // At 256 390 / 208, at 1024 668 / 460; 48 keys and two stages of Q 380 / 205 and 630 / 438.
      return {128, 64, 2, 1};
  }
}

template <typename T_, typename Out_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_,
          bool kLong>
struct ForwardConfig {
  using T = T_;      // of Q, K and V
  using Out = Out_;  // of the output
  static constexpr ForwardTile kTile = forward_tile(kHeadDim_, kHeadDimV_, kFeatures_, kLong);
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
