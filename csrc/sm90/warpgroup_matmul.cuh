// Matrix products of one warpgroup: WGMMA. B lies in shared memory (tile_layout.cuh); A too, or it
// is in registers. A product is started here; ptx::wgmma_wait waits for its end.
#pragma once

#include <cstdint>

#include "common/shared_address.h"
#include "common/warp.h"
#include "ptx/ldmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/tile_layout.cuh"

namespace flash::sm90 {

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of A and D: M of wgmma
constexpr int kWarpRows = kWarpgroupRows / 4;

// What one instruction sums over: K of wgmma.
constexpr int kWgmmaBytes = 32;
template <typename T>
constexpr int kWgmmaDepth = kWgmmaBytes / sizeof(T);

// A tile as an operand, from row `row` on, a multiple of 8. Products are summed over its columns.
// tile: (parts, kRows, kBoxCols<T>), or parts of kRowBytes a row
template <typename T, int kRows, typename Sum = uint32_t, int kRowBytes = kPartRowBytes>
struct KMajor {
  static constexpr int kTrans = 0;
  ptx::WgmmaDescriptor<Sum, kRowBytes> descriptor;

  __device__ explicit KMajor(const T* tile, int row = 0)
      : descriptor(shared_address(tile) + row * kRowBytes, 0) {}

  // The same from row `row` of its rows on.
  __device__ KMajor from_row(int row) const {
    KMajor rows = *this;
    rows.descriptor.start += row * kRowBytes / 16;
    return rows;
  }
  // The same, kept in a register: the compiler cannot compute it again.
  __device__ KMajor kept() const {
    KMajor rows = *this;
    rows.descriptor.start = warp_uniform(descriptor.start);
    return rows;
  }

  // Of the kWgmmaDepth<T> columns of step k.
  __device__ uint64_t step(int k) const {
    constexpr int kSteps = kRowBytes / kWgmmaBytes;  // of a part
    return descriptor + (k / kSteps * kRows * kRowBytes + k % kSteps * kWgmmaBytes) / 16;
  }
};

// A tile as an operand, from column `col` on. Products are summed over its rows. WGMMA takes it in
// 16 bits alone. tile: (parts, kRows, kBoxCols<T>)
template <typename T, int kRows, typename Sum = uint32_t>
struct MnMajor {
  static_assert(sizeof(T) == 2);
  static constexpr int kTrans = 1;
  ptx::WgmmaDescriptor<Sum> descriptor;

  __device__ explicit MnMajor(const T* tile, int row = 0, int col = 0)
      : descriptor(shared_address(tile + (col / kBoxCols<T> * kRows + row) * kBoxCols<T> +
                                  col % kBoxCols<T>),
                   kRows * kPartRowBytes) {}
  // The columns of a whole tile, from row `row` on.
  __device__ explicit MnMajor(const KMajor<T, kRows, Sum>& tile, int row = 0)
      : descriptor(tile.descriptor) {
    descriptor.start += row * kPartRowBytes / 16 + (kRows * kPartRowBytes / 16 << 16);
  }

  // Of the kWgmmaDepth<T> rows of step k.
  __device__ uint64_t step(int k) const {
    return descriptor + k * kWgmmaDepth<T> * kPartRowBytes / 16;
  }
};

// Starts D = A B or, with kAccumulate, D += A B.
// d: (64, kColTiles * 8), accumulators
// a: KMajor, 64 rows of a tile (rows, kDepth), or MnMajor, 64 columns of a tile (kDepth, columns)
// b: KMajor, a tile (kColTiles * 8, kDepth), or MnMajor, a tile (kDepth, kColTiles * 8)
template <typename T, int kDepth, bool kAccumulate = false, int kColTiles, typename Sum, typename A,
          typename B>
__device__ void start_multiply(Sum (&d)[kColTiles][4], const A& a, const B& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / kWgmmaDepth<T>; ++k) {
    ptx::wgmma<B::kTrans, A::kTrans>(d, a.step(k), b.step(k), kAccumulate || k > 0, T());
  }
  ptx::wgmma_commit();
}

// No array is empty. (A variable: at the expression itself compilers of CUDA 12.5 to 12.8 crash.)
template <int kSteps>
constexpr int kLeast1 = kSteps > 0 ? kSteps : 1;

// A operands of some steps.
template <int kSteps>
using Operands = uint32_t[kLeast1<kSteps>][4];

// The same with the first kSteps steps of A in registers.
template <typename T, int kDepth, int kSteps, typename Sum, int kColTiles, typename A, typename B>
__device__ void start_mixed_multiply(Sum (&d)[kColTiles][4], const Operands<kSteps>& first,
                                     const A& a, const B& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / kWgmmaDepth<T>; ++k) {
    if (k < kSteps) {
      ptx::wgmma<B::kTrans>(d, first[k], b.step(k), k > 0, T());
    } else {
      ptx::wgmma<B::kTrans, A::kTrans>(d, a.step(k), b.step(k), k > 0, T());
    }
  }
  ptx::wgmma_commit();
}

// The same with A in registers, or some steps of it: kFirst .. kFirst + kCount - 1.
// a: (64, kSteps * kWgmmaDepth<T>), A operands
// b: as above, with a depth of kSteps * kWgmmaDepth<T>
template <typename T, bool kAccumulate = false, int kFirst = 0, int kCount = 0, typename Sum,
          int kColTiles, int kSteps, typename B>
__device__ void start_multiply(Sum (&d)[kColTiles][4], const uint32_t (&a)[kSteps][4], const B& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = kFirst; k < (kCount == 0 ? kSteps : kFirst + kCount); ++k) {
    ptx::wgmma<B::kTrans>(d, a[k], b.step(k), kAccumulate || k > 0, T());
  }
  ptx::wgmma_commit();
}
template <typename T, int kColTiles, int kSteps, typename B>
__device__ void start_multiply_accumulate(float (&d)[kColTiles][4], const uint32_t (&a)[kSteps][4],
                                          const B& b) {
  start_multiply<T, true>(d, a, b);
}
template <typename T, int kColTiles, int kSteps, typename B>
__device__ void start_multiply_or_accumulate(float (&d)[kColTiles][4],
                                             const uint32_t (&a)[kSteps][4], const B& b,
                                             bool accumulate) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::wgmma<B::kTrans>(d, a[k], b.step(k), accumulate || k > 0, T());
  }
  ptx::wgmma_commit();
}

// A warp's 16 rows of the first kSteps steps of a tile, from row `row` on, as A operands.
// tile: (parts, kRows, kBoxCols<T>)
template <typename T, int kRows, int kSteps>
__device__ void load_operands(Operands<kSteps>& a, const T* tile, int row, int lane) {
  const int lane_row = row + lane % 16;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::ldmatrix_x4(a[k],
                     shared_address(tile) + place_of_chunk<kRows>(lane_row, k * 2 + lane / 16));
  }
}

}  // namespace flash::sm90
