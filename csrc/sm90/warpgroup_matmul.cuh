// Matrix products of one warpgroup: WGMMA. B lies in shared memory (tile_layout.cuh) and is given
// by a descriptor; A too, or it is in registers. A product is started here; ptx::wgmma_wait waits
// for its end.
#pragma once

#include <cstdint>

#include "common/shared_address.h"
#include "ptx/wgmma.h"
#include "sm90/tile_layout.cuh"

namespace flash::sm90 {

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of A and D: M of wgmma

// Descriptor of a tile's rows from `row` on, a multiple of 8. Products are summed over its columns.
// tile: (parts, rows, kBoxCols)
template <typename T>
__device__ uint64_t k_major(const T* tile, int row = 0) {
  return ptx::wgmma_descriptor(shared_address(tile) + row * kPartRowBytes, 0);
}

// Descriptor of a tile. Products are summed over its rows.
// tile: (parts, kRows, kBoxCols)
template <int kRows, typename T>
__device__ uint64_t mn_major(const T* tile) {
  return ptx::wgmma_descriptor(shared_address(tile), kRows * kPartRowBytes);
}

// Starts D = A B^T.
// d: (64, kColTiles * 8), accumulators
// a: k_major of (64, kDepth), within a tile of kRowsA rows
// b: k_major of (kColTiles * 8, kDepth), a whole tile
template <typename T, int kDepth, int kRowsA, int kColTiles>
__device__ void start_multiply(float (&d)[kColTiles][4], uint64_t a, uint64_t b) {
  constexpr int kSteps = kBoxCols / 16, kRowsB = kColTiles * 8;
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const int part = k / kSteps, bytes = k % kSteps * 32;
    ptx::wgmma_k16<0>(d, a + (part * kRowsA * kPartRowBytes + bytes) / 16,
                      b + (part * kRowsB * kPartRowBytes + bytes) / 16, k > 0, T());
  }
  ptx::wgmma_commit();
}

// Starts D += A B.
// d: (64, kColTiles * 8), accumulators
// a: (64, kSteps * 16), A operands in registers
// b: mn_major of (kSteps * 16, kColTiles * 8)
template <typename T, int kColTiles, int kSteps>
__device__ void start_multiply_accumulate(float (&d)[kColTiles][4], const uint32_t (&a)[kSteps][4],
                                          uint64_t b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::wgmma_k16<1>(d, a[k], b + k * 16 * kPartRowBytes / 16, true, T());
  }
  ptx::wgmma_commit();
}

}  // namespace flash::sm90
