// Matrix products of one warp, on operands in shared memory.
#pragma once

#include <cstdint>

#include "common/fragment.h"
#include "common/tile_layout.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma_sync.h"
#include "ptx/opaque.h"

namespace flash {

// How a tile in shared memory is read as an operand: by its rows as they lie, or transposed.
enum class Order { kRows, kTransposed };

// Part of a shared (rows, kCols) tile as an operand of a warp's matmul: blocks of 16 x 16, of which
// the warp takes every kStride-th along the columns of the tile, from `col_block` on.
template <int kCols, Order kOrder, int kStride = 1>
struct Operand16 {
  using Layout = TileLayout<kCols>;
  uint32_t tile;    // shared address
  uint32_t offset;  // where this lane points ldmatrix in the first block. Apart from `tile`, so
                    // that operands that differ only in that share registers.

  __device__ Operand16(uint32_t tile, int row_block, int col_block, bool by_rows, int lane)
      : tile(tile),
        offset(Layout::in_block(by_rows ? Layout::by_rows(lane) : Layout::by_columns(lane),
                                row_block, col_block)) {}

  // Keeps the compiler from computing all addresses before the loop around a product, and then
  // spilling them.
  __device__ void hide() { offset = ptx::opaque(offset); }

  __device__ void load(uint32_t (&fragment)[4], int row_block, int col_block) const {
    const uint32_t place = tile + Layout::in_block(offset, row_block, col_block * kStride);
    if constexpr (kOrder == Order::kTransposed) {
      ptx::ldmatrix_x4_trans(fragment, place);
    } else {
      ptx::ldmatrix_x4(fragment, place);
    }
  }
};

// A operand: (m, k) as it lies, or the transpose of a (k, m) tile.
template <int kCols, Order kOrder, int kStride = 1>
struct OperandA : Operand16<kCols, kOrder, kStride> {
  __device__ OperandA(uint32_t tile, int row_block, int col_block, int lane)
      : Operand16<kCols, kOrder, kStride>(tile, row_block, col_block, kOrder == Order::kTransposed,
                                          lane) {}
  // Rows m * 16 .., columns k * 16 .. of A.
  __device__ void fragment(uint32_t (&a)[4], int m, int k) const {
    kOrder == Order::kTransposed ? this->load(a, k, m) : this->load(a, m, k);
  }
};

// B operand: (k, n), the transpose of an (n, k) tile that is read by its rows, or a (k, n) tile
// read transposed.
template <int kCols, Order kOrder, int kStride = 1>
struct OperandB : Operand16<kCols, kOrder, kStride> {
  __device__ OperandB(uint32_t tile, int row_block, int col_block, int lane)
      : Operand16<kCols, kOrder, kStride>(tile, row_block, col_block, kOrder == Order::kRows,
                                          lane) {}
  // Rows k * 16 .., columns n * 16 .. of B: two operands of 8 columns.
  __device__ void fragment(uint32_t (&b)[4], int k, int n) const {
    kOrder == Order::kTransposed ? this->load(b, k, n) : this->load(b, n, k);
  }
};

// B operand that is held in registers.
template <int kDepth, int kBlocks>
struct HeldOperandB {
  const uint32_t (&held)[kDepth][kBlocks][4];

  __device__ explicit HeldOperandB(const uint32_t (&held)[kDepth][kBlocks][4]) : held(held) {}
  __device__ void hide() {}
  __device__ void fragment(uint32_t (&b)[4], int k, int n) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = held[k][n][i];
  }
};

// held: what `b` gives for each block of 16 x 16
template <int kDepth, int kBlocks, typename B>
__device__ void hold(uint32_t (&held)[kDepth][kBlocks][4], const B& b) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) b.fragment(held[k][n], k, n);
  }
}

// D += A B over kDepth blocks of 16; D begins at column block `col_block` of B.
// d: (kRowTiles, kColTiles) accumulators of m16n8
template <typename T, int kDepth, int kRowTiles, int kColTiles, typename A, typename B>
__device__ void multiply_accumulate(float (&d)[kRowTiles][kColTiles][4], A a, B b,
                                    int col_block = 0) {
  static_assert(kColTiles % 2 == 0);
  a.hide();
  b.hide();
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    uint32_t a_fragment[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) a.fragment(a_fragment[m], m, k);
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t b_fragment[4];
      b.fragment(b_fragment, k, col_block + n / 2);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16(d[m][n], a_fragment[m], b_fragment[0], b_fragment[1], T());
        ptx::mma_m16n8k16(d[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3], T());
      }
    }
  }
}

// S = Q K^T for some queries and the keys of one warp.
// scores: (kRows / 16, kKeys / 8) accumulators of m16n8
// q: (kRows, kHeadDim), k: (kKeys, kHeadDim), shared addresses within tiles
template <typename T, int kHeadDim, int kRowTiles, int kColTiles>
__device__ void compute_scores(float (&scores)[kRowTiles][kColTiles][4], uint32_t q, uint32_t k,
                               int lane) {
  using Layout = TileLayout<kHeadDim>;
  const uint32_t q_offset = Layout::by_columns(lane), k_offset = Layout::by_rows(lane);
  // A product waits for the one before it in the same accumulators: few of them are doubled.
  constexpr int kChains = kRowTiles * kColTiles <= 2 && kHeadDim >= 64 ? 2 : 1;
  float chains[kChains][kRowTiles][kColTiles][4];
  for (int i = 0; i < kChains; ++i) clear(chains[i]);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    auto& sums = chains[d % kChains];
    uint32_t q_fragment[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::ldmatrix_x4(q_fragment[m], q + Layout::in_block(q_offset, m, d));
    }
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t k_fragment[4];  // keys n*8 .. n*8+15: two B operands
      ptx::ldmatrix_x4(k_fragment, k + Layout::in_block(k_offset, n / 2, d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16(sums[m][n], q_fragment[m], k_fragment[0], k_fragment[1], T());
        ptx::mma_m16n8k16(sums[m][n + 1], q_fragment[m], k_fragment[2], k_fragment[3], T());
      }
    }
  }
  for_each(scores, [&](float& x, int m, int n, int j) {
    x = chains[0][m][n][j];
    if constexpr (kChains == 2) x += chains[1][m][n][j];
  });
}

// O += P V for 16 keys and every kTeam-th block of 16 columns.
// out: (kRows / 16, kHeadDimV / 8 / kTeam) accumulators, p: (kRows / 16) A operands
// v: shared address of the lane's place in the warp's first block of V; row_block: in units of 16
template <typename T, int kHeadDimV, int kTeam, int kRowTiles, int kOutTiles>
__device__ void multiply_by_values(float (&out)[kRowTiles][kOutTiles][4],
                                   const uint32_t (&p)[kRowTiles][4], uint32_t v, int row_block) {
#pragma unroll
  for (int d = 0; d < kOutTiles; d += 2) {
    uint32_t v_fragment[4];  // 16 columns: two B operands
    ptx::ldmatrix_x4_trans(v_fragment,
                           TileLayout<kHeadDimV>::in_block(v, row_block, d / 2 * kTeam));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::mma_m16n8k16(out[m][d], p[m], v_fragment[0], v_fragment[1], T());
      ptx::mma_m16n8k16(out[m][d + 1], p[m], v_fragment[2], v_fragment[3], T());
    }
  }
}

}  // namespace flash
