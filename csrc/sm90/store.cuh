// Stores a tile of accumulators to global memory, straight from registers. The lanes that share a
// row exchange elements first, so that each writes neighbouring ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/pack.h"

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

// Writes one row of accumulators, rounded to Out, in chunks of kWords words a lane: 2 want fewer
// instructions, 4 fewer accesses to memory.
// out: accumulators of m16n8, of which it takes the upper or lower `half` of the rows
// row: the row's first element, or null: not written
template <typename Out, int kWords, int kOutTiles>
__device__ void store_row(Out* row, int cols, const float (&out)[kOutTiles][4], int half,
                          int lane) {
  static_assert(sizeof(Out) == 2 && kOutTiles % kWords == 0);
  using Chunk = std::conditional_t<kWords == 4, uint4, uint2>;
#pragma unroll
  for (int d = 0; d < kOutTiles; d += kWords) {
    // Columns 2 t, 2 t + 1 of kWords accumulators; then neighbouring columns of one.
    alignas(sizeof(Chunk)) uint32_t chunk[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      chunk[i] = pack(out[d + i][2 * half], out[d + i][2 * half + 1], Out());
    }
    transpose_in_lanes(chunk, lane);
    const int col = (d + lane % kWords) * 8 + lane % 4 / kWords * kWords * 2;
    if (row != nullptr && col < cols) {
      *reinterpret_cast<Chunk*>(row + col) = reinterpret_cast<const Chunk&>(chunk);
    }
  }
}

// Both rows that a lane holds some elements of.
template <typename Out, int kWords, int kOutTiles>
__device__ void store_accumulators(Out* const (&rows)[2], int cols,
                                   const float (&out)[kOutTiles][4], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) store_row<Out, kWords>(rows[half], cols, out, half, lane);
}

}  // namespace flash::sm90
