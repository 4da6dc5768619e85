// Tiles and shared memory of the decode kernel.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <type_traits>

#include "common/tile_layout.h"
#include "params.h"

namespace flash::decode {

// Parts into which the keys of a tile are divided at most.
constexpr int kMostSplits = 256;

// Tile shapes: one or two row tiles of 16 rows, on Hopper by few warps or by many. Where two row
// tiles would spill, further thread blocks take the rows that are left.
constexpr int kFewWarps = 4, kManyWarps = 8;
constexpr int count_row_tiles(int headdim_v) { return headdim_v <= 128 ? 2 : 1; }
constexpr int count_tiles(int headdim_v, bool hopper) {
  return count_row_tiles(headdim_v) * (hopper ? 2 : 1);
}

// kHopper_: in clusters, launched with programmatic stream serialization. An SM there has room for
// eight warps, in one thread block or two, with 24 KB of keys and values under way for each;
// elsewhere one thread block of four fits 99 KB.
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
  static constexpr int kMostThreads = 32 * (kHopper ? kManyWarps : kFewWarps);
  static constexpr int kBlocksPerSm = kHopper ? 1 : 2;
  // Keys of a step of a warp. Of e4m3 as many as have the bytes of others, unless they would spill.
  static constexpr bool kWideStep = kHeadDim * kRowTiles < 256 && kHeadDim <= 128;
  static constexpr int kBlockN = kHeadDim == 32 || (kIsE4m3 && kWideStep) ? 32 : 16;

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

  template <int kWarps>
  struct SharedStorage {
    alignas(128) T q[kRows * kHeadDim];  // in the order of TileLayout
    union {
      alignas(128) KV ring[kWarps][kSlots][kSlotElements];  // in the order of these layouts
      float4 out[kWarps][kRows][kOutStride / 4];            // at the end: what each warp has
    };
    float2 rows[kWarps][kRows], merged[kRows];  // references and sums: of warps, of all of them
  };

  // Of shared memory of a thread block. alone: so much that it has an SM to itself
  static constexpr size_t shared_bytes(int warps, bool alone) {
    const size_t bytes = warps == kManyWarps
                             ? sizeof(SharedStorage < kHopper ? kManyWarps : kFewWarps >)
                             : sizeof(SharedStorage<kFewWarps>);
    return alone && kHopper && bytes < 116 * 1024 ? 116 * 1024 : bytes;
  }
};

}  // namespace flash::decode
