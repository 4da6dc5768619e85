// Tiles and shared memory of the decode kernel.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "common/tile_layout.h"
#include "params.h"
#include "sm90/pipeline.cuh"

namespace flash::decode {

constexpr int kWarps = 4;
// Parts into which the keys of a tile are divided at most.
constexpr int kMostSplits = 256;

// Rows of the wide tile, beside that of 16; 0: there is none. WGMMA takes 64, in 16 bits alone.
// Where 32 would spill, further thread blocks take the rows that are left.
constexpr int wide_rows(bool hopper, bool is_e4m3, int headdim_v) {
  return hopper && !is_e4m3 ? 64 : headdim_v <= 128 ? 32 : 0;
}

// A (kRows, kCols) tile of 16 bits as WGMMA reads it (sm90/tile_layout.cuh), named as TileLayout.
template <int kRows, int kCols>
struct PartLayout {
  static constexpr int kGroup = 8;
  static constexpr int kGroupBytes = kRows * 128;
  static constexpr int kChunks = (kCols + 63) / 64 * kGroup;

  __device__ static constexpr uint32_t offset(int row, int chunk) {
    return chunk / kGroup * kGroupBytes + row * 128 + ((chunk ^ row) % kGroup) * 16;
  }
};

// kHopper_: in clusters. An SM there runs two thread blocks with up to 96 KB of keys and values
// under way, or one of 64 rows with 128 KB; elsewhere one thread block fits 99 KB.
template <typename T_, typename KV_, int kHeadDim_, int kHeadDimV_, FeatureSet kFeatures_,
          int kRows_, bool kHopper_>
struct DecodeConfig {
  using T = T_;    // of Q and O
  using KV = KV_;  // of K and V
  static constexpr bool kIsE4m3 = std::is_same_v<KV, __nv_fp8_e4m3>;
  static_assert(kIsE4m3 || std::is_same_v<KV, T>);
  using P = std::conditional_t<kIsE4m3, __half, T>;  // of P: e4m3 is widened to it
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kRows = kRows_;
  // Whether the warps share keys, each with 16 rows: WGMMA. Else each has all rows and its own
  // keys.
  static constexpr bool kWarpgroup = kRows == 64;
  static constexpr int kRowTiles = kWarpgroup ? 1 : kRows / 16;  // of a warp
  static constexpr bool kHopper = kHopper_;
  static constexpr int kMostCluster = kHopper ? 16 : 1;  // thread blocks
  // Four warps load for two warpgroups.
  static constexpr int kWarpgroups = kWarpgroup ? 2 : 0;  // that multiply
  static constexpr int kThreads = 32 * kWarps * (1 + kWarpgroups);
  // Wide heads want more registers than there are for each thread: loaders give theirs.
  static constexpr bool kGivesRegisters = kWarpgroup && kHeadDimV > 128;
  static constexpr int kRegisters = 168, kRegistersToLoad = 72, kRegistersToMultiply = 216;
  static constexpr int kWiderDim = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
  static constexpr int kBlocksPerSm = kWarpgroup ? 1 : 2;
  // Keys that a warp loads for a step. Of e4m3 as many as have the bytes of others, unless they
  // would spill.
  static constexpr bool kWideStep = kHeadDim * kRowTiles < 256 && kHeadDim <= 128;
  static constexpr bool kIsNarrow = kWiderDim <= 64;
  static constexpr int kBlockN = kIsNarrow || (kIsE4m3 && kWideStep) ? 32 : 16;
  static constexpr int kStepKeys = kWarps * kBlockN;              // of all warps
  static constexpr int kKeys = kWarpgroup ? kStepKeys : kBlockN;  // that a warp computes with

  // A slot of a ring holds a block of keys or of values.
  static constexpr int kRings = kWarpgroup ? 1 : kWarps;
  template <int kTileRows, int kCols, typename Element>
  using Layout = std::conditional_t<kWarpgroup, PartLayout<kTileRows, kCols>,
                                    TileLayout<kCols * sizeof(Element) / 2>>;
  using QueryLayout = Layout<kRows, kHeadDim, T>;
  using KeyLayout = Layout<kKeys, kHeadDim, KV>;
  using ValueLayout = Layout<kKeys, kHeadDimV, KV>;
  static constexpr int kQueryElements = kRows * QueryLayout::kChunks * 8;
  static constexpr int kSlotBytes =
      kKeys * 16 * (kHeadDim > kHeadDimV ? KeyLayout::kChunks : ValueLayout::kChunks);

  // Results that a thread block merges: of warps, or warpgroups, with keys of their own. Behind the
  // columns of a row are its reference and its sum.
  static constexpr int kResults = kWarpgroup ? kWarpgroups : kWarps;
  static constexpr int kFours = kHeadDimV / 4;
  // With 8 more columns, lanes that write two of each of 8 rows meet different banks; with 16,
  // those that write four.
  static constexpr int kOutStride = kHeadDimV + (kIsE4m3 ? 16 : 8);
  // Rows that the thread blocks of a cluster send to one of them, at most.
  static constexpr int kReceivedRows = !kHopper           ? 0
                                       : !kWarpgroup      ? kRows * 3 / 2
                                       : kHeadDimV <= 192 ? 80
                                                          : 64;
  static constexpr int kReceivedBytes = kReceivedRows * (kFours + 1) * 16;

  // Spans of 32 rows whose pages a warp asks for in advance, at most.
  static constexpr int kMostSpans = kWarpgroup && kHeadDimV > 192 ? 1 : kBlockN / 4;
  static constexpr int kPageBytes = kWarps * kMostSpans * 32 * sizeof(int);

  // An SM of Hopper has 228 KB, of which it keeps 1 KB for each thread block.
  static constexpr bool kTwoAnSm = kHopper && kBlocksPerSm == 2;
  static constexpr int kMostBytes = (kHopper ? 228 / kBlocksPerSm - 1 : 99) * 1024;
  static constexpr int kLeftBytes =
      kMostBytes - 256 - kPageBytes - kQueryElements * 2 - kReceivedBytes;
  // More under way is slower (docs/design-notes.md).
  static constexpr bool kFewUnderWay = kWiderDim > 64 && kWiderDim <= 128;
  static constexpr int kUnderWay = 1024 * (!kHopper       ? 80
                                           : kWarpgroup   ? 128
                                           : kIsE4m3      ? 32
                                           : kFewUnderWay ? 64
                                                          : 96);
  static constexpr int kRingBytes = std::min(kLeftBytes, kUnderWay) / kRings;
  static constexpr int kSlots = kRingBytes / kSlotBytes;
  static_assert(kSlots >= (kWarpgroup ? 4 : 2));
  // As many as the ring is long.
  static constexpr int kSpans = std::min(((kSlots + 1) / 2 * kBlockN + 31) / 32, kMostSpans);
  using Ring = sm90::Pipeline<kSlots>;

  static constexpr int kAlignment = kWarpgroup ? 1024 : 128;
  struct SharedStorage {
    union {
      struct {  // in the order of these layouts
        alignas(kAlignment) T q[kQueryElements];
        alignas(kAlignment) KV ring[kRings][kSlots][kSlotBytes / sizeof(KV)];
      };
      float4 out[kResults][kRows][kOutStride / 4];  // at the end
    };
    float4 received[kReceivedRows > 0 ? kReceivedRows : 1][kFours + 1];
    int pages[kWarps][kSpans][32];
    Ring ring_pipeline;  // of warpgroups
    uint64_t queries_full, received_full;
  };
  // At least so much that no three thread blocks fit an SM: the plan counts with two.
  static constexpr size_t kSharedBytes =
      std::max(sizeof(SharedStorage), size_t{kTwoAnSm ? 228 / 3 * 1024 : 0});
  // So much that one thread block fills an SM.
  static constexpr size_t kBytesAlone = kTwoAnSm ? 116 * 1024 : kSharedBytes;
  static_assert(kSharedBytes <= kMostBytes);
};

}  // namespace flash::decode
