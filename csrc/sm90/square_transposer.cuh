// Transposes squares of 64 x 64 bytes in shared memory, in place: values of e4m3, which WGMMA takes
// with keys side by side alone.
//
// TMA writes a square in rows of 64 bytes, one of each key, with its swizzle of 64 bytes.
// Transposed it has a row for each column of the values, with the same swizzle, and keys in the
// order of scaled_blocks.cuh. So a block of 16 x 16 bytes changes places with another, or lies
// where it has been: a warp takes two of them at a time, and needs no room but its registers.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.h"
#include "ptx/opaque.h"
#include "ptx/stmatrix.h"

namespace flash::sm90 {

constexpr int kSquareRows = 64;  // and columns
constexpr int kSquareBytes = kSquareRows * kSquareRows;

class SquareTransposer {
 public:
  __device__ explicit SquareTransposer(int lane) : first_(lane < 16) {
    // A lane points ldmatrix and stmatrix to 16 bytes of a row: of the first block with lanes 0 to
    // 15, of the second with the others.
    const int r = lane % 8, half = lane / 8 % 2;
    load_ = (8 * half + r) * kSquareRows + r / 2 % 4 * 16;
    // A register has rows 2 r for r < 4 and 2 r + 1 for the others, or the other way round: then
    // the 8 rows that stmatrix writes at once are in different banks.
    store_ = (2 * r + ((r >= 4) ^ half)) * kSquareRows + r % 4 * 16;
  }

  // By a warp: two squares, the second kDistance bytes behind the first.
  // square: the first one's address in shared memory, a multiple of 1024
  template <int kDistance>
  __device__ void transpose_two(uint32_t square) const {
    constexpr int kAtOnce = 2;  // steps
    const uint32_t load = ptx::opaque(load_), store = ptx::opaque(store_);
#pragma unroll
    for (int step = 0; step < 8; step += kAtOnce) {
      uint32_t x[kAtOnce][2][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t from = square + (load ^ place(step + j, first_));
#pragma unroll
        for (int k = 0; k < 2; ++k) ptx::ldmatrix_x4_trans(x[j][k], from + k * kDistance);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t to = square + (store ^ place(step + j, !first_));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          // Two keys of two columns, and those 8 keys on, become four keys of each column.
          uint32_t y[4];
#pragma unroll
          for (int block = 0; block < 4; block += 2) {
            const uint32_t low = x[j][k][block], high = x[j][k][block + 1];
            y[block] = __byte_perm(low, high, first_ ? kEven : kOdd);
            y[block + 1] = __byte_perm(low, high, first_ ? kOdd : kEven);
          }
          ptx::stmatrix_x4(to + k * kDistance, y);
        }
      }
    }
  }

 private:
  static constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;  // bytes of two registers
  // From a block to the next.
  static constexpr uint32_t kBlockCols = 16, kBlockRows = 16 * kSquareRows;

  // What is added, without carries, to find a lane's block of a step, or where its transpose goes.
  // Steps take blocks (a, a ^ c) and (a ^ c, a), which change places, for c = 1, 2, 3; for c = 0
  // blocks (a, a) and (a + 1, a + 1).
  // upper: whether the block is the one above the diagonal
  __device__ uint32_t place(int step, bool upper) const {
    const int c = step / 2, a = step % 2 * (c < 2 ? 2 : 1);
    const uint32_t other = c > 0    ? c * (upper ? kBlockCols : kBlockRows)
                           : first_ ? 0
                                    : kBlockRows + kBlockCols;
    return other ^ a * (kBlockRows + kBlockCols);
  }

  const bool first_;  // of the two blocks
  uint32_t load_, store_;
};

}  // namespace flash::sm90
