// Matrix products of one warp on keys and values in e4m3, which lie in shared memory as they came:
// ldmatrix moves pairs of them as if they were one number, and they are widened in registers. Each
// result is to be multiplied by kE4m3Unit.
//
// A lane then has other columns than the fragments of the matmul want (ptx/mma_sync.h): of 16
// columns, places 0..7 of K's operands are columns 0, 2, .. 14 and places 8..15 the odd ones, and
// the same is true of the tiles of the output. So the queries are stored in this order
// (order_queries), and columns_of undoes it.
#pragma once

#include <cstdint>

#include "common/e4m3.h"
#include "common/fragment.h"
#include "common/tile_layout.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma_sync.h"

namespace flash::decode {

// A tile of kCols bytes a row.
template <int kCols>
using ByteLayout = TileLayout<kCols / 2>;

// Brings each 16 columns of a tile of 16-bit numbers into the order of the operands, in place, by
// all threads.
// q: (kRows, kHeadDim) in the order of TileLayout
// signs: the sign bits of two numbers, to negate all; or 0
template <int kThreads, int kRows, int kHeadDim>
__device__ void order_queries(unsigned char* q, uint32_t signs = 0) {
  using Layout = TileLayout<kHeadDim>;
  constexpr int kBlocks = kHeadDim / 16;
  for (int i = threadIdx.x; i < kRows * kBlocks; i += kThreads) {
    const int row = i / kBlocks, chunk = i % kBlocks * 2;
    auto& first = *reinterpret_cast<uint4*>(q + Layout::offset(row, chunk));
    auto& second = *reinterpret_cast<uint4*>(q + Layout::offset(row, chunk + 1));
    const uint4 x = first, y = second;
    const auto even = [=](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410) ^ signs; };
    const auto odd = [=](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632) ^ signs; };
    first = make_uint4(even(x.x, x.y), even(x.z, x.w), even(y.x, y.y), even(y.z, y.w));
    second = make_uint4(odd(x.x, x.y), odd(x.z, x.w), odd(y.x, y.y), odd(y.z, y.w));
  }
}

// S = Q K^T / kE4m3Unit for some queries and the keys of one warp.
// scores: (kRows / 16, kKeys / 8) accumulators of m16n8
// q: (kRows, kHeadDim) from order_queries, k: (kKeys, kHeadDim) bytes, shared addresses
template <typename T, int kHeadDim, int kRowTiles, int kColTiles>
__device__ void compute_e4m3_scores(float (&scores)[kRowTiles][kColTiles][4], uint32_t q,
                                    uint32_t k, int lane) {
  using QueryLayout = TileLayout<kHeadDim>;
  using KeyLayout = ByteLayout<kHeadDim>;
  const uint32_t q_offset = QueryLayout::by_columns(lane), k_offset = KeyLayout::by_rows(lane);
  clear(scores);
#pragma unroll
  for (int d = 0; d < kHeadDim / 32; ++d) {
    uint32_t q_fragment[2][kRowTiles][4];  // of 16 columns each
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix_x4(q_fragment[half][m], q + QueryLayout::in_block(q_offset, m, 2 * d + half));
      }
    }
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t bytes[4];  // keys n*8 .. n*8+7, of both halves; the next 8 keys
      ptx::ldmatrix_x4(bytes, k + KeyLayout::in_block(k_offset, n / 2, d));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t even = widen_even<T>(bytes[2 * i + half]);
          const uint32_t odd = widen_odd<T>(bytes[2 * i + half]);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            ptx::mma_m16n8k16(scores[m][n + i], q_fragment[half][m], even, odd, T());
          }
        }
      }
    }
  }
}

// O += P V / kE4m3Unit for 16 keys.
// out: (kRows / 16, kHeadDimV / 8) accumulators, of each 16 columns the even ones and the odd ones
// p: (kRows / 16) A operands of float16
// v: shared address of the lane's place in the first block of V; row_block: in units of 16
template <int kHeadDimV, int kRowTiles>
__device__ void multiply_by_e4m3_values(float (&out)[kRowTiles][kHeadDimV / 8][4],
                                        const uint32_t (&p)[kRowTiles][4], uint32_t v,
                                        int row_block) {
#pragma unroll
  for (int d = 0; d < kHeadDimV / 32; ++d) {
    uint32_t bytes[4];  // of the first 16 columns keys 0 .. 7 and 8 .. 15; of the others
    ptx::ldmatrix_x4_trans(bytes, ByteLayout<kHeadDimV>::in_block(v, row_block, d));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = bytes[2 * half], high = bytes[2 * half + 1];
      const uint32_t even[2] = {widen_even<__half>(low), widen_even<__half>(high)};
      const uint32_t odd[2] = {widen_odd<__half>(low), widen_odd<__half>(high)};
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int n = 4 * d + 2 * half;
        ptx::mma_m16n8k16(out[m][n], p[m], even[0], even[1], __half());
        ptx::mma_m16n8k16(out[m][n + 1], p[m], odd[0], odd[1], __half());
      }
    }
  }
}

// Columns 4 * (lane % 4) and on of 16, in the accumulators' row lane / 4 or, if `half`, lane / 4
// + 8. even, odd: the accumulators of the even columns and of the odd ones
__device__ inline float4 columns_of(const float (&even)[4], const float (&odd)[4], int half) {
  const int j = 2 * half;
  return make_float4(even[j], odd[j], even[j + 1], odd[j + 1]);
}

}  // namespace flash::decode
