// TMA loads of a block of rows into a tile in shared memory (tile_layout.cuh).
//
// A tensor map says where a tensor's rows lie, dense or with any strides (tensor_map.h). In a paged
// cache each box of rows is found through the block table. All lanes of a warp load together.
// `full` is the barrier that then completes its phase.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "common/divisor.h"
#include "ptx/opaque.h"
#include "sm90/pipeline.cuh"
#include "sm90/square_transposer.cuh"
#include "sm90/tile_layout.cuh"

namespace flash::sm90 {

// A tensor in pages, (pages, heads, page_size, dim): row i of sequence b is row i % page_size of
// page pages[b * stride + i / page_size].
struct BlockTable {
  const int* pages;  // null: not paged
  int64_t stride;
  Divisor page_size;
  int page_count;
  int rows;  // what a row of the table holds
};

// The rows of one head of a sequence: row i is row first + i of a slot, or of a sequence in pages.
// map: (slots, heads, rows, dim)
struct SequenceRows {
  int slot, batch, first, head;
  const BlockTable& table;
};

// Has TMA copy a box, whose first column is `col`, by one lane.
template <typename... Place>
__device__ void load_columns(void* box, const CUtensorMap& map, uint64_t& full, int col,
                             Place... place) {
  cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global, box, &map,
                                  {col, place...}, &full);
}

// Has TMA copy a box of rows of part `part`, by one lane.
// box: (rows, kBoxCols<T>), in a tile
// place: of the box's first row in the map's outer dimensions, innermost first
template <typename T, typename... Place>
__device__ void load_box(T* box, const CUtensorMap& map, uint64_t& full, int part, Place... place) {
  load_columns(box, map, full, part * kBoxCols<T>, place...);
}

// Loads `rows`, kRows from `row` on, in boxes of box_rows: a lane takes a box.
// tile: (kParts<T, kCols>, kRows, kBoxCols<T>)
// other_bytes: what copies of the caller's bring to `full` as well
// first_part: of the tensor's, the tile's first
template <int kRows, int kCols, typename T>
__device__ void load_rows(T* tile, const CUtensorMap& map, uint64_t& full, const SequenceRows& rows,
                          int row, int box_rows, int lane, int other_bytes = 0,
                          int first_part = 0) {
  const BlockTable& table = rows.table;
  if (lane == 0) arrive_expecting(full, sizeof(T) * kTileSize<T, kRows, kCols> + other_bytes);
  __syncwarp();
#pragma unroll 1  // registers are few here
  for (int box_row = ptx::opaque(lane) * box_rows; box_row < kRows; box_row += 32 * box_rows) {
    int slot = rows.slot, slot_row = ptx::opaque(rows.first) + row + box_row;
    if (table.pages != nullptr) {
      // Past the table's end it fetches its last row: what lies outside the sequence is hidden.
      slot_row = min(slot_row, table.rows - 1);
      const int page = table.page_size.quotient(slot_row);
      slot = table.pages[ptx::opaque(rows.batch) * table.stride + page];
      slot = min(max(slot, 0), table.page_count - 1);
      slot_row -= page * table.page_size.value;
    }
#pragma unroll
    for (int part = 0; part < kParts<T, kCols>; ++part) {
      load_box(tile + (part * kRows + box_row) * kBoxCols<T>, map, full, first_part + part,
               slot_row, rows.head, slot);
    }
  }
}

// Zeros rows `valid_rows` .. rows - 1 of a tile that has arrived, by one warp: of values behind a
// sequence's last. Their probabilities are 0, but 0 * NaN is NaN.
template <int kCols, typename T>
__device__ void clear_tail(T* tile, int rows, int valid_rows, int lane) {
  constexpr int kChunks = kPartRowBytes / sizeof(uint4);  // of a row of a part
#pragma unroll 1
  for (int i = valid_rows * kChunks + lane; i < rows * kChunks; i += 32) {
#pragma unroll
    for (int part = 0; part < kParts<T, kCols>; ++part) {
      reinterpret_cast<uint4*>(tile)[part * rows * kChunks + i] = make_uint4(0, 0, 0, 0);
    }
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// The same of a square of values of 8 bits (square_transposer.cuh).
template <typename T>
__device__ void clear_rows(T* square, int valid_rows, int lane) {
  static_assert(sizeof(T) == 1);
  constexpr int kChunks = kSquareRows / sizeof(uint4);
#pragma unroll 1
  for (int i = 0; i < kSquareRows * kChunks; i += 32) {
    if ((i + lane) / kChunks >= valid_rows) {
      reinterpret_cast<uint4*>(square)[i + lane] = make_uint4(0, 0, 0, 0);
    }
  }
  __syncwarp();
}

}  // namespace flash::sm90
