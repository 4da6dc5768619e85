// Tiles of 16-bit elements in shared memory: their swizzled layout, and how warps fill and read
// them.
#pragma once

#include <cstdint>

#include "ptx/cp_async.h"

namespace flash {

// Address within the shared memory window, as ldmatrix and cp.async take it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A (rows, kCols) tile lies row by row in chunks of 16 bytes; chunk c of row r is stored in place
// c ^ (r % 8). So the 8 chunks that ldmatrix reads at once (8 rows, one column), the 8 that a
// quarter warp copies (one row) and the accumulator's 8 rows all fall on different banks.
template <int kCols>
struct TileLayout {
  static_assert(kCols % 64 == 0, "the swizzle permutes groups of 8 chunks of 8 elements");
  static constexpr int kChunks = kCols / 8;  // in a row
  static constexpr int kRowBytes = kCols * 2;

  // Byte offset of a chunk.
  __device__ static constexpr uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row % 8)) * 16;
  }

  // Where a lane points ldmatrix in the 16 x 16 block at the tile's origin. Its four 8 x 8 matrices
  // arrive in the order top left, bottom left, top right, bottom right (by_columns) or top left,
  // top right, bottom left, bottom right (by_rows).
  __device__ static uint32_t by_columns(int lane) { return offset(lane % 16, lane / 16); }
  __device__ static uint32_t by_rows(int lane) {
    return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // The same place in the block at (row_block, col_block), in units of 16. Only the column within a
  // group of 64 takes part in the swizzle: a loop over blocks needs four registers for addresses,
  // the rest are constants of the instruction.
  __device__ static constexpr uint32_t in_block(uint32_t lane_offset, int row_block,
                                                int col_block) {
    return (lane_offset ^ (col_block % 4 * 32)) + col_block / 4 * 128 + row_block * 16 * kRowBytes;
  }
};

// Copies the (kRows, kCols) tiles of a matrix in turn, from its first row on, by kThreads threads.
template <typename T, int kRows, int kCols, int kThreads>
class TileLoader {
  using Layout = TileLayout<kCols>;
  static constexpr int kRowsPerPass = kThreads / Layout::kChunks;
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0);

 public:
  __device__ TileLoader(const T* first_row, int64_t row_stride, int thread)
      : row_(thread / Layout::kChunks),
        offset_(Layout::offset(row_, thread % Layout::kChunks)),
        step_(kRowsPerPass * row_stride),
        source_(first_row + row_ * row_stride + thread % Layout::kChunks * 8) {}

  // Starts the copy of the next tile. Rows from `valid_rows` on become zero and are not read. The
  // caller waits: cp_async_wait_all, then a barrier.
  __device__ void load_next(uint32_t tile, int valid_rows) {
#pragma unroll
    for (int pass = 0; pass < kRows; pass += kRowsPerPass) {
      ptx::cp_async_16_zfill(tile + offset_ + pass * Layout::kRowBytes, source_,
                             pass < valid_rows - row_);
      source_ += step_;
    }
  }

 private:
  const int row_;          // of this thread's chunk in the tile
  const uint32_t offset_;  // of that chunk in the shared tile, in bytes
  const int64_t step_;     // from pass to pass, in elements
  const T* source_;        // this thread's chunk of the next tile
};

}  // namespace flash
