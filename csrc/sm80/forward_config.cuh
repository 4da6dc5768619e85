// Tile shapes and shared memory of the Ampere-class forward.
#pragma once

#include "common/shared_tile.h"
#include "params.h"

namespace flash::sm80 {

struct ForwardTile {
  int block_m;        // queries of a thread block
  int block_n;        // keys of one step
  int warps;          // each owns block_m / warps queries and the whole head dim
  int blocks_per_sm;  // caps the registers of a thread at 65536 / (32 * warps * blocks_per_sm)
};

// Common to all rows: 32 queries a warp, so that both of its 16-row fragments use each K and V
// fragment it loads (with 16, shared memory is busy longer than the tensor cores); two independent
// thread blocks an SM, one computing exponentials while the other multiplies, also in the 164 KB of
// an A100. TFLOP/s on an H200 in bf16, 4096 tokens, full / causal; docs/design-notes.md has them
// all.
constexpr ForwardTile forward_tile(int headdim) {
  // Scores fill the registers that the output leaves. 334 / 330; with 64 keys and three blocks an
  // SM 314 / 310.
  if (headdim == 64) return {128, 128, 4, 2};
  // Output 128 + scores 64 of 255 registers. 395 / 371; with 32 keys 373 / 350.
  return {128, 64, 4, 2};
}

template <typename T_, int kHeadDim_, FeatureSet kFeatures>
struct ForwardConfig {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128, "no tile shape yet");
  static_assert(kFeatures == FeatureSet::kPlain, "softcap, ALiBi and dropout are not here yet");

  using T = T_;
  static constexpr ForwardTile kTile = forward_tile(kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kBlockM / kTile.warps;

  // Tiles in the order of TileLayout<kHeadDim>.
  struct SharedStorage {
    alignas(128) T q[kBlockM * kHeadDim];  // in the end each warp's rows hold its output
    alignas(128) T k[kBlockN * kHeadDim];
    alignas(128) T v[kBlockN * kHeadDim];
  };
};

}  // namespace flash::sm80
