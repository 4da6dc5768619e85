// How tiles of 16-bit elements lie in shared memory, for ldmatrix.
#pragma once

#include <cstdint>

namespace flash {

// A (rows, kCols) tile lies row by row in chunks of 16 bytes; chunk c of row r is stored in place
// c ^ (r % 8), or c ^ (r / 2 % 4) where rows are an odd number of 64 bytes, or c ^ (r / 4 % 2) of
// 32 bytes. So the 8 chunks that ldmatrix reads at once (8 rows, one column), the 8 that a quarter
// warp copies and the accumulator's 8 rows all fall on different banks.
template <int kCols>
struct TileLayout {
  static_assert(kCols % 16 == 0, "the swizzle permutes groups of 2, 4 or 8 chunks of 8 elements");
  static constexpr int kChunks = kCols / 8;  // in a row
  static constexpr int kRowBytes = kCols * 2;
  // Chunks that the swizzle permutes.
  static constexpr int kGroup = kCols % 64 == 0 ? 8 : kCols % 32 == 0 ? 4 : 2;
  static constexpr int kGroupBytes = kGroup * 16;  // from a group of a row to the next

  // Byte offset of a chunk.
  __device__ static constexpr uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row / (8 / kGroup) % kGroup)) * 16;
  }

  // Where a lane points ldmatrix in the 16 x 16 block at the tile's origin. Its four 8 x 8 matrices
  // arrive in the order top left, bottom left, top right, bottom right (by_columns) or top left,
  // top right, bottom left, bottom right (by_rows).
  __device__ static uint32_t by_columns(int lane) { return offset(lane % 16, lane / 16); }
  __device__ static uint32_t by_rows(int lane) {
    return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // The same place in the block at (row_block, col_block), in units of 16. Only the column within
  // a group takes part in the swizzle: a loop over blocks needs four registers for addresses, the
  // rest are constants of the instruction. Offsets may be composed while the columns within a group
  // add up without a carry.
  __device__ static constexpr uint32_t in_block(uint32_t lane_offset, int row_block,
                                                int col_block) {
    constexpr int kBlocks = kGroup / 2;  // of 16 columns in a group
    return (lane_offset ^ (col_block % kBlocks * 32)) + col_block / kBlocks * kGroup * 16 +
           row_block * 16 * kRowBytes;
  }
};

}  // namespace flash
