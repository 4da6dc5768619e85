// Tile shapes and shared memory of the Ampere-class forward.
#pragma once

#include <vector_types.h>

#include <cstddef>

#include "params.h"

namespace flash::sm80 {

struct ForwardTile {
  int block_m;        // queries of a thread block
  int block_n;        // keys of one step
  int warps;          // in teams that share block_m / (warps / team) queries
  int team;           // warps of a team: 1 or 2 (row_team.cuh)
  int blocks_per_sm;  // caps the registers of a thread at 65536 / (32 * warps * blocks_per_sm)
  // Microseconds on an H200: of what comes before and after the steps of a thread block, of a step
  // if it is alone on an SM, and if blocks_per_sm, where more than 1, are there. They are for the
  // plan (forward_plan.h), fitted to what benchmarks/tiles.py measured.
  float ends, step, shared_step = 0.f;
};

// The tile shapes of a pair of head dims; {} ends the list. forward_plan.h takes one of those that
// fit the shared memory, of which a thread block may use 227 KB on Hopper, 163 KB on an A100, 99 KB
// on other Ampere and Ada GPUs.
//
// Large work: 32 queries a warp, so that both of its 16-row fragments use each K and V fragment it
// loads (with 16, shared memory is busy longer than the tensor cores). Where the output of 32
// queries does not fit the registers, two warps share them. TFLOP/s on an H200 in bf16, 4096
// tokens, full / causal, to be compared within one comment; docs/design-notes.md has them all.
//
// Small work: 64 queries make twice as many thread blocks, and 16 queries a warp, or a team, keep
// all tensor cores of an SM busy with one of them.
constexpr ForwardTile forward_tile(int headdim, int headdim_v, int choice) {
  switch (headdim) {
    case 32:
      // 271 / 256; 128 keys, two blocks an SM 253 / 236; four blocks spill, 261 / 247.
      if (choice == 0) return {128, 64, 4, 1, 3, 2.66f, 0.85f, 1.57f};
      break;
    case 64:
      // Scores fill the registers that the output leaves. 334 / 330; with 64 keys and three blocks
      // an SM 314 / 310.
      if (choice == 0) return {128, 128, 4, 1, 2, 2.86f, 1.89f, 3.04f};
      if (choice == 1) return {64, 64, 4, 1, 4, 2.41f, 0.70f, 1.78f};
      if (choice == 2) return {64, 128, 4, 1, 3, 2.35f, 1.17f, 2.50f};
      break;
    case 96:
      // 360 / 336; with 96 keys 366 / 342, but spills, and 340 against 346 at 1024 tokens.
      if (choice == 0) return {128, 64, 4, 1, 2, 3.69f, 1.36f, 2.12f};
      if (choice == 1) return {64, 64, 4, 1, 3, 2.66f, 1.00f, 1.98f};
      if (choice == 2) return {64, 128, 4, 1, 3, 2.62f, 1.80f, 3.77f};
      break;
    case 128:
      // Output 128 + scores 64 of 255 registers. 395 / 371; with 32 keys 373 / 350.
      if (choice == 0) return {128, 64, 4, 1, 2, 4.11f, 1.65f, 2.73f};
      if (choice == 1) return {64, 64, 4, 1, 3, 2.83f, 1.09f, 2.40f};
      if (choice == 2) return {64, 128, 4, 1, 2, 2.91f, 1.86f, 3.15f};
      // Two blocks fit an SM with 99 KB: 375 / 360 there; one block of the first 320 / 306.
      if (choice == 3) return {128, 32, 4, 1, 2, 3.80f, 0.95f, 1.47f};
      break;
    case 192:
      if (headdim_v == 128) {
        // 403 / 373; with 48 keys 401 / 369.
        if (choice == 0) return {128, 64, 4, 1, 2, 4.76f, 1.88f, 3.20f};
      } else {
        // 393 / 373; one warp for 16 queries 330 / 321.
        if (choice == 0) return {128, 128, 8, 2, 1, 5.36f, 3.90f};
        // 354 / 345. Two blocks fit an SM of an A100.
        if (choice == 1) return {64, 64, 4, 2, 2, 3.81f, 1.56f, 2.23f};
        // Two blocks fit an SM with 99 KB: 285 / 281 there; one block of the second 253 / 248.
        if (choice == 2) return {64, 32, 4, 1, 2, 3.40f, 0.94f, 1.44f};
      }
      break;
    case 256:
      // 394 / 361; one warp for 16 queries 328 / 308.
      if (choice == 0) return {128, 128, 8, 2, 1, 6.20f, 5.24f};
      // 349 / 321.
      if (choice == 1) return {128, 64, 8, 2, 1, 5.28f, 2.91f};
      // 328 / 308. With one block an SM, all that 99 KB hold, 268 / 264; teams with 32 keys, which
      // fit as well, 199 / 201.
      if (choice == 2) return {64, 64, 4, 1, 2, 3.85f, 1.92f, 3.40f};
      break;
  }
  return {};
}

constexpr int count_forward_tiles(int headdim, int headdim_v) {
  int count = 0;
  while (forward_tile(headdim, headdim_v, count).warps > 0) ++count;
  return count;
}

// Whether the kernels of a feature set take pages. Of other head dims plain ones would spill.
constexpr bool takes_pages(FeatureSet features, int headdim) {
  return features == FeatureSet::kFull || headdim <= 64 || headdim == 128;
}

template <typename T_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_, int kChoice,
          bool kPaged_, bool kDivided_>
struct ForwardConfig {
  using T = T_;
  static constexpr bool kPaged = kPaged_;      // K and V may be in pages
  static constexpr bool kDivided = kDivided_;  // thread blocks have parts of the keys of a tile
  static constexpr ForwardTile kTile = forward_tile(kHeadDim_, kHeadDimV_, kChoice);
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kTeam = kTile.team;
  static constexpr int kTeams = kTile.warps / kTeam;
  static constexpr int kTeamRows = kBlockM / kTeams;
  static constexpr int kWarpKeys = kBlockN / kTeam;

  // What the warps of a team leave for each other.
  struct Exchange {
    uint4 p[kTeam][kWarpKeys / 16][kTeamRows / 16][32];  // A operands of m16n8k16, by lane
    float rows[kTeam][kTeamRows];
  };

  // Tiles in the order of TileLayout.
  struct SharedStorage {
    alignas(128) T q[kBlockM * kHeadDim];  // in the end each team's rows hold its output
    alignas(128) T k[kBlockN * kHeadDim];
    alignas(128) T v[kBlockN * kHeadDimV];
    Exchange exchange[kTeams];  // not there if kTeam is 1
  };
  static constexpr size_t kSharedBytes =
      kTeam == 1 ? offsetof(SharedStorage, exchange) : sizeof(SharedStorage);
};

}  // namespace flash::sm80
