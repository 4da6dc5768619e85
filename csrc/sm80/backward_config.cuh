// Tile shapes and shared memory of the Ampere-class backward.
#pragma once

#include <cstddef>

#include "params.h"
#include "sm80/shared_tile.cuh"

namespace flash::sm80 {

struct BackwardTile {
  int block_m;        // queries of one step
  int block_n;        // keys of a thread block
  int warps;          // share each of the five matmuls:
  int warps_m_s;      //   S and dP (block_m, block_n): this many along the queries, the rest keys
  int warps_n_dkv;    //   dK and dV (block_n, dim): this many along the keys, the rest columns
  int warps_m_dq;     //   dQ (block_m, dim): this many along the queries, the rest columns
  int dq_steps;       //   in as many steps, to leave registers to dK and dV
  int stages;         // of Q and dO; 2: the next ones are loaded during a whole step
  int blocks_per_sm;  // caps the registers of a thread at 65536 / (32 * warps * blocks_per_sm)
  bool holds_v = false;  // as an operand of dP, in registers
};

// The tile shapes of a head dim, the preferred one first; {} ends the list. tile_choice.h takes one
// by shared memory, of which a thread block may use 227 KB on Hopper, 163 KB on an A100, 99 KB on
// other Ampere and Ada GPUs. TFLOP/s on an H200 in bf16, 4096 tokens, full / causal, and the speed
// of other shapes beside it; docs/design-notes.md has them all.
constexpr BackwardTile backward_tile(int headdim, FeatureSet features, int choice) {
  const bool plain = features == FeatureSet::kPlain;
  switch (headdim) {
    case 32:
      // 240 / 224; {128, 64, 4, ...} 0.90, with spills.
      if (choice == 0) return {64, 128, 4, 1, 4, 2, 1, 2, 2};
      // With 99 KB 190 / 182; one block an SM of the first 172 / 161, of {128, 128, 8, ...} 188 /
      // 178.
      if (choice == 1) return {64, 64, 4, 2, 2, 4, 1, 2, 2};
      break;
    case 64:
      // Large warp tiles (32 x 64 of S) spare shared memory, which is busier than the tensor cores.
      // 279 / 261; {128, 128, 8, ...} 0.92, with spills. Holding V 1.03 / 1.02, with one stage 1.01
      // / 1.01; with 64 x 32 of S it takes half of the registers. The full set has none left: 0.88.
      if (choice == 0 && plain) return {128, 64, 4, 2, 2, 4, 1, 2, 2, true};
      if (choice == 1 && plain) return {128, 64, 4, 2, 2, 4, 1, 1, 2, true};
      if (choice == 0) return {128, 64, 4, 4, 2, 4, 1, 2, 2};
      if (choice == 1) return {128, 64, 4, 4, 2, 4, 1, 1, 2};
      // With 99 KB 247 / 237; one block an SM of the second 204 / 192. Holding V 1.05 / 1.05.
      if (choice == 2) return {64, 64, 4, 2, 2, 2, 1, 1, 2, plain};
      break;
    case 96:
      // 268 / 254; with two stages 0.97, {96, 64, 4, ...} 0.98, {64, 128, 8, ...} 0.97.
      // Holding V, with dQ in two steps, 1.01 / 1.01; in one step 0.95, with spills.
      if (choice == 0 && plain) return {64, 64, 4, 2, 2, 4, 2, 1, 2, true};
      if (choice == 0) return {64, 64, 4, 2, 2, 2, 1, 1, 2};
      // With 99 KB 228 / 216; one block an SM of the first 201 / 193.
      if (choice == 1) return {64, 96, 6, 2, 3, 2, 1, 1, 1};
      break;
    case 128:
      // 306 / 291; two warps along the queries of dQ 0.995, with spills.
      // Two blocks an SM of {64, 64, 4, ...}, with twice the traffic of dQ, were 3 % slower.
      if (choice == 0) return {64, 128, 8, 2, 4, 4, 1, 2, 1};
      // With 99 KB 237 / 229; {64, 64, 8, ...} 0.89.
      if (choice == 1) return {32, 128, 8, 2, 4, 2, 1, 1, 1};
      break;
    case 192:
      // 270 / 258; {64, 64, 8, ...} with two stages 0.88.
      if (choice == 0) return {128, 64, 8, 4, 2, 4, 2, 1, 1};
      if (choice == 1) return {64, 64, 8, 2, 2, 2, 1, 2, 1};
      if (choice == 2) return {32, 64, 8, 2, 2, 2, 1, 1, 1};
      break;
    case 256:
      // 32 x 32 of S a warp; 266 / 253; {64, 64, 8, ...} with two stages 0.95.
      if (choice == 0) return {128, 64, 8, 4, 2, 2, 4, 1, 1};
      if (choice == 1) return {64, 64, 8, 4, 2, 2, 2, 1, 1};
      if (choice == 2) return {32, 32, 4, 2, 1, 1, 2, 1, 1};
      break;
  }
  return {};
}

// Which blocks of 16 rows or columns of a tile a warp has, where kWarps share them, kEach for each.
// They are dealt out one by one; if kWarps is no power of two a warp has neighbours. In both cases
// no carry disturbs TileLayout::in_block.
template <int kWarps, int kEach>
struct WarpBlocks {
  static constexpr bool kDealt = (kWarps & (kWarps - 1)) == 0;
  static_assert(kDealt || (kEach & (kEach - 1)) == 0);
  static constexpr int kStride = kDealt ? kWarps : 1;  // from one to the next
  __device__ static int first(int warp) { return kDealt ? warp : warp * kEach; }
};

template <typename T_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures, int kChoice = 0>
struct BackwardConfig {
  using Next = BackwardConfig<T_, kHeadDim_, kHeadDimV_, kFeatures, kChoice + 1>;
  static constexpr bool kIsLast = backward_tile(kHeadDim_, kFeatures, kChoice + 1).warps == 0;
  using T = T_;
  static constexpr BackwardTile kTile = backward_tile(kHeadDim_, kFeatures, kChoice);
  static constexpr bool kFull = kFeatures == FeatureSet::kFull;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr bool kHoldsV = kTile.holds_v;

  // Warps along the rows and columns of each product.
  static constexpr int kWarpsRowS = kTile.warps_m_s, kWarpsColS = kTile.warps / kWarpsRowS;
  static constexpr int kWarpsRowDkv = kTile.warps_n_dkv, kWarpsColDkv = kTile.warps / kWarpsRowDkv;
  static constexpr int kWarpsRowDq = kTile.warps_m_dq, kWarpsColDq = kTile.warps / kWarpsRowDq;
  static_assert(kBlockM % (16 * kWarpsRowS) == 0 && kBlockN % (16 * kWarpsColS) == 0);
  static_assert(kBlockN % (16 * kWarpsRowDkv) == 0 && kHeadDim % (16 * kWarpsColDkv) == 0 &&
                kHeadDimV % (16 * kWarpsColDkv) == 0);
  static_assert((kWarpsColDkv & (kWarpsColDkv - 1)) == 0);  // or WarpBlocks for those columns
  static_assert(kBlockM % (16 * kWarpsRowDq) == 0 && kHeadDim % (16 * kWarpsColDq) == 0);

  // Tiles in the order of TileLayout.
  struct SharedStorage {
    alignas(128) T q[kStages][kBlockM * kHeadDim];
    alignas(128) T dout[kStages][kBlockM * kHeadDimV];
    alignas(128) T k[kBlockN * kHeadDim];   // in the end dK
    alignas(128) T v[kBlockN * kHeadDimV];  // in the end dV
    alignas(128) T p[kBlockM * kBlockN];
    alignas(128) T ds[kBlockM * kBlockN];
    alignas(128) float statistics[2 * kBlockM];  // lse, then delta
  };
  static constexpr size_t kSharedBytes = sizeof(SharedStorage);
};

}  // namespace flash::sm80
