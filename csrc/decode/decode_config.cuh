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

// Tile shapes: of one or two row tiles of 16 rows, on Hopper with few or with many warps. Where two
// row tiles would spill, further thread blocks take the rows that are left.
constexpr int kFewWarps = 4, kManyWarps = 8;
constexpr int count_row_tiles(int headdim_v) { return headdim_v <= 128 ? 2 : 1; }
constexpr int count_tiles(int headdim_v, bool hopper) {
  return count_row_tiles(headdim_v) * (hopper ? 2 : 1);
}

// kHopper_: in clusters, launched with programmatic stream serialization. An SM there has room for
// eight warps, of one thread block or of two, with 24 KB of keys and values under way for each;
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

  // What a thread block of so many warps has in shared memory.
  struct SharedStorage {
    unsigned char* bytes;
    int warps;

    static constexpr int kQueryBytes = kRows * kHeadDim * sizeof(T);
    // At the end the output of a warp takes the place of its ring, and perhaps more.
    static constexpr int kRingBytes = kSlots * kSlotBytes;
    static constexpr int kOutBytes = kRows * kOutStride * sizeof(float);
    static constexpr int kWarpBytes = kRingBytes > kOutBytes ? kRingBytes : kOutBytes;
    static constexpr int kStateBytes = kRows * sizeof(float2);

    static constexpr int count(int warps) {
      return kQueryBytes + kStateBytes + warps * (kWarpBytes + kStateBytes);
    }

    // (kRows, kHeadDim), in the order of TileLayout
    __device__ T* q() const { return reinterpret_cast<T*>(bytes); }
    // (kSlots, kSlotElements), in the order of KeyLayout and ValueLayout
    __device__ unsigned char* ring(int warp) const {
      return bytes + kQueryBytes + warp * kRingBytes;
    }
    // What a warp has of a row. The outputs of all warps lie where the rings were.
    __device__ float4* out(int warp, int row) const {
      return reinterpret_cast<float4*>(bytes + kQueryBytes) +
             (warp * kRows + row) * (kOutStride / 4);
    }
    // References and sums: of warps, of all of them.
    __device__ float2& state(int warp, int row) const {
      return reinterpret_cast<float2*>(bytes + kQueryBytes +
                                       warps * kWarpBytes)[warp * kRows + row];
    }
    __device__ float2& merged(int row) const { return state(warps, row); }
  };
};

}  // namespace flash::decode
