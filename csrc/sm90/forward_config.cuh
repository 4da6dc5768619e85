// Tile shapes and shared memory of the Hopper forward.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of wgmma

constexpr int kTileSlots = 4;  // of tiles that are under way

// A box of the copy engine has kBoxCols columns; a tile is made of (rows, kBoxCols) parts, the last
// of which may be wider than the matrix.
constexpr int kBoxCols = 64;
constexpr int kPartBytes = kBoxCols * 2;  // of a row
template <int kCols>
constexpr int kParts = (kCols + kBoxCols - 1) / kBoxCols;

struct ForwardTile {
  int block_m;   // queries of a tile: 64 for each consumer warpgroup
  int block_n;   // keys of one step
  int stages;    // of K and of V in shared memory
  int q_stages;  // of Q; 2: the next tile's is loaded beside this one's
};

constexpr bool operator==(const ForwardTile& a, const ForwardTile& b) {
  return a.block_m == b.block_m && a.block_n == b.block_n && a.stages == b.stages &&
         a.q_stages == b.q_stages;
}

// 128 queries in two warpgroups, which leave registers for wide blocks of keys; for long sequences
// 192 in three where the output is narrow enough, which reads K and V less often. `is_long`:
// forward_launch.cuh. TFLOP/s on an H200 in bf16, 16384 tokens, full / causal, to be compared
// within one comment; docs/design-notes.md has more.
constexpr ForwardTile forward_tile(int headdim, int headdim_v, FeatureSet features, bool is_long) {
  const bool three = is_long && features == FeatureSet::kPlain;  // the full set's registers do not
  switch (headdim) {
    case 64:
      // At 4096 593 / 492, with 128 queries 475 / 432; at 256 202 / 89 and 238 / 125.
      return three ? ForwardTile{192, 128, 3, 2} : ForwardTile{128, 128, 4, 2};
    case 96:
      // At 4096 691 / 565, with 128 queries 553 / 478; at 256 193 / 99 and 265 / 129.
      return three ? ForwardTile{192, 96, 2, 1} : ForwardTile{128, 96, 2, 2};
    case 128:
      // At 4096 753 / 657, with 128 queries 714 / 648; at 512 498 / 279 and 479 / 294. 112 keys
      // instead of 128: 670 / 594 at 4096.
      return three ? ForwardTile{192, 64, 3, 2} : ForwardTile{128, 128, 2, 2};
    case 192:
      // At 4096 744 / 651; 112 keys 720 / 614; 192 queries 737 / 572.
      if (headdim_v == 128) return {128, 128, 2, 1};
      // At 16384 790 / 791, with 64 keys 775 / 764; at 256 333 / 166 and 386 / 198.
      return is_long ? ForwardTile{128, 96, 2, 1} : ForwardTile{128, 64, 2, 2};
    default:
      // At 4096 803 / 725, at 256 391 / 202; 80 keys 787 / 713 and 358 / 184.
      return {128, 64, 2, 1};
  }
}

template <typename T_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_, bool kLong>
struct ForwardConfig {
  using T = T_;
  static constexpr ForwardTile kTile = forward_tile(kHeadDim_, kHeadDimV_, kFeatures_, kLong);
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kQStages = kTile.q_stages;

  static constexpr int kConsumers = kBlockM / kWarpgroupRows;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread. All start with 65536 / kThreads, rounded down to a multiple of 8.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  static_assert(kBlockM % kWarpgroupRows == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kBlockN % 16 == 0 && kHeadDimV <= kHeadDim);

  struct SharedStorage {
    alignas(1024) T q[kQStages][kParts<kHeadDim> * kBlockM * kBoxCols];
    alignas(1024) T k[kStages][kParts<kHeadDim> * kBlockN * kBoxCols];
    alignas(1024) T v[kStages][kParts<kHeadDimV> * kBlockN * kBoxCols];
    // Barriers: "full" when the copy engine has written, "empty" when the consumers have read.
    uint64_t q_full[kQStages], q_empty[kQStages];
    uint64_t k_full[kStages], k_empty[kStages];
    uint64_t v_full[kStages], v_empty[kStages];
    uint64_t tail_full;  // the last block of V, whose rows past the sequence are cleared first
    uint64_t tile_full[kTileSlots], tile_empty[kTileSlots], tile_wanted;
    Tile tiles[kTileSlots];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash::sm90
