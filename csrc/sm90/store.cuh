// Stores a tile of accumulators to global memory: straight from registers, where the lanes that
// share a row exchange elements first, so that each writes neighbouring ones; or through shared
// memory.
#pragma once

#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

#include "common/pack.h"
#include "common/shared_address.h"
#include "ptx/stmatrix.h"
#include "sm90/tile_layout.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// The matrix of which each of kSize neighbouring lanes holds a row, transposed.
template <int kSize>
__device__ void transpose_in_lanes(uint32_t (&x)[kSize], int lane) {
#pragma unroll
  for (int step = 1; step < kSize; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i & step) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i | step], step);
      if (upper) {
        x[i] = taken;
      } else {
        x[i | step] = taken;
      }
    }
  }
}

// Writes kWords * 8 columns of a row, of which each of four lanes has two of each 8, from column
// `first` on.
// row: its first element, or null: not written
template <int kWords, typename Out>
__device__ void store_words(Out* row, int first, int cols, uint32_t (&x)[kWords], int lane) {
  static_assert(sizeof(Out) == 2);
  using Chunk = std::conditional_t<kWords == 4, uint4, uint2>;
  transpose_in_lanes(x, lane);
  const int col = first + lane % kWords * 8 + lane % 4 / kWords * kWords * 2;
  if (row != nullptr && col < cols) {
    *reinterpret_cast<Chunk*>(row + col) = reinterpret_cast<const Chunk&>(x);
  }
}

// Writes one row of accumulators, rounded to Out, in chunks of kWords words a lane: 2 want fewer
// instructions, 4 fewer accesses to memory.
// out: accumulators of m16n8, of which it takes the upper or lower `half` of the rows
// row: the row's first element, or null: not written
template <typename Out, int kWords, int kOutTiles>
__device__ void store_row(Out* row, int cols, const float (&out)[kOutTiles][4], int half,
                          int lane) {
  static_assert(kOutTiles % kWords == 0);
#pragma unroll
  for (int d = 0; d < kOutTiles; d += kWords) {
    alignas(4 * kWords) uint32_t chunk[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      chunk[i] = pack(out[d + i][2 * half], out[d + i][2 * half + 1], Out());
    }
    store_words(row, d * 8, cols, chunk, lane);
  }
}

// Both rows that a lane holds some elements of.
template <typename Out, int kWords, int kOutTiles>
__device__ void store_accumulators(Out* const (&rows)[2], int cols,
                                   const float (&out)[kOutTiles][4], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) store_row<Out, kWords>(rows[half], cols, out, half, lane);
}

// 8 columns of a row of a tile of 16 bits.
template <typename T>
__device__ T* chunk_of(T* tile, int row, int chunk) {
  constexpr int kChunks = kPartRowBytes / 16;  // of a row of a part
  return tile + (chunk / kChunks * kWarpRows + row) * kBoxCols<T> +
         (chunk % kChunks ^ row % kChunks) * 8;
}

// Writes a warp's accumulators, rounded to Out, to shared memory, where TMA and other lanes see
// them. tile: (kParts, kWarpRows, kBoxCols<Out>)
template <typename Out, int kOutTiles>
__device__ void stage_accumulators(Out* tile, const float (&out)[kOutTiles][4], int lane) {
  static_assert(sizeof(Out) == 2 && kOutTiles % 2 == 0);
#pragma unroll
  for (int d = 0; d < kOutTiles; d += 2) {
    uint32_t x[4];  // the upper and the lower rows of 8 columns, then those of the next 8
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = pack(out[d + i / 2][i % 2 * 2], out[d + i / 2][i % 2 * 2 + 1], Out());
    }
    ptx::stmatrix_x4(shared_address(chunk_of(tile, lane % kWarpRows, d + lane / kWarpRows)), x);
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  __syncwarp();
}

// Copies rows that stage_accumulators has written, each to a place of its own, by a warp.
// target: where row lane % kWarpRows goes, or null: nowhere
template <typename Out>
__device__ void store_staged_rows(Out* target, int cols, Out* tile, int lane) {
  if (target == nullptr) return;
#pragma unroll 1
  for (int chunk = lane / kWarpRows; chunk * 8 < cols; chunk += 32 / kWarpRows) {
    reinterpret_cast<uint4*>(target)[chunk] =
        *reinterpret_cast<const uint4*>(chunk_of(tile, lane % kWarpRows, chunk));
  }
}

}  // namespace flash::sm90
