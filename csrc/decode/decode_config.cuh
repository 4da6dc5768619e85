// Tiles and shared memory of the decode kernel.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <type_traits>

#include "common/tile_layout.h"
#include "params.h"

namespace flash::decode {

constexpr int kWarps = 4;
// Parts into which the keys of a tile are divided at most.
constexpr int kMostSplits = 256;

// Tile shapes: one or two row tiles of 16 rows. Where two would spill, further thread blocks take
// the rows that are left.
constexpr int count_tiles(int headdim_v) { return headdim_v <= 128 ? 2 : 1; }

// kHopper_: in clusters. An SM there has room for two thread blocks with 24 KB of keys and values
// under way for each warp; elsewhere one thread block fits 99 KB.
template <typename T_, typename KV_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_,
          int kRowTiles_, bool kHopper_>
struct DecodeConfig {
  using T = T_;    // of Q and O
  using KV = KV_;  // of K and V
  static constexpr bool kIsE4m3 = std::is_same_v<KV, __nv_fp8_e4m3>;
  static_assert(kIsE4m3 || std::is_same_v<KV, T>);
  using P = std::conditional_t<kIsE4m3, __half, T>;  // of P: e4m3 is widened to it
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr bool kHopper = kHopper_;
  static constexpr int kMostCluster = kHopper ? 16 : 1;  // thread blocks
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = 2;
  // Keys of a step of a warp. Of e4m3 as many as have the bytes of others, unless they would spill.
  static constexpr bool kWideStep = kHeadDim * kRowTiles < 256 && kHeadDim <= 128;
  static constexpr int kBlockN = kHeadDim == 32 || (kIsE4m3 && kWideStep) ? 32 : 16;
  static constexpr int kStepKeys = kWarps * kBlockN;  // of all warps

  // A slot of a warp's ring holds a block of keys or of values.
  static constexpr int kSlotElements = kBlockN * (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV);
  static constexpr int kSlotBytes = kSlotElements * sizeof(KV);
  using KeyLayout = TileLayout<kHeadDim * sizeof(KV) / 2>;
  using ValueLayout = TileLayout<kHeadDimV * sizeof(KV) / 2>;
  static constexpr int kSlots = (kHopper ? 24 : 20) * 1024 / kSlotBytes;
  static_assert(kSlots >= 2);

  // Of the output of a warp: with 8 more columns, lanes that write two of each of 8 rows meet
  // different banks; with 16, those that write four.
  static constexpr int kOutStride = kHeadDimV + (kIsE4m3 ? 16 : 8);

  struct SharedStorage {
    alignas(128) T q[kRows * kHeadDim];  // in the order of TileLayout
    union {
      alignas(128) KV ring[kWarps][kSlots][kSlotElements];  // in the order of these layouts
      float4 out[kWarps][kRows][kOutStride / 4];            // at the end: what each warp has
    };
    float2 rows[kWarps][kRows], merged[kRows];  // references and sums: of warps, of all of them
  };
  static constexpr size_t kSharedBytes = sizeof(SharedStorage);
  // So much that one thread block fills an SM.
  static constexpr size_t kBytesAlone = kHopper ? 116 * 1024 : kSharedBytes;
  // An SM has 228 KB on Hopper and keeps 1 KB for each thread block.
  static_assert(kHopper ? kBlocksPerSm * (kSharedBytes + 1024) <= 228 * 1024
                        : kSharedBytes <= 99 * 1024);
};

}  // namespace flash::decode
