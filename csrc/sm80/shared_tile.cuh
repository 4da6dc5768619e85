// Tiles of 16-bit elements in shared memory (common/tile_layout.h): how threads fill and empty
// them.
#pragma once

#include <cstdint>

#include "common/pack.h"
#include "common/tile_layout.h"
#include "ptx/cp_async.h"
#include "ptx/opaque.h"

namespace flash::sm80 {

// Copies (kRows, kCols) tiles of a matrix, by kThreads threads, from one tile to the next. Columns
// from `cols` on become zero and are not read. Where kAnyAlignment, `aligned` says whether rows
// begin at multiples of 16 bytes; if they do not, elements are copied one by one.
template <typename T, int kRows, int kCols, int kThreads, bool kAnyAlignment>
class TileLoader {
  using Layout = TileLayout<kCols>;
  static constexpr int kLanes = Layout::kGroup;  // threads of a row, each with kGroups chunks
  static constexpr int kGroups = Layout::kChunks / kLanes;
  static constexpr int kRowsPerPass = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && kRowsPerPass % 8 == 0);

 public:
  __device__ TileLoader(const T* first_row, int64_t row_stride, int cols, bool aligned, int thread)
      : thread_(thread),
        cols_(cols),
        aligned_(aligned),
        row_stride_(row_stride),
        source_(first_row + thread / kLanes * row_stride + thread % kLanes * 8) {}

  // Starts the copy of the tile, whose rows from `valid_rows` on become zero and are not read, and
  // moves on by one tile. The caller waits: cp_async_wait_all, then a barrier.
  __device__ void load(uint32_t tile, int valid_rows) {
    const int64_t row_stride = ptx::opaque(row_stride_);
    const T* source = source_;
    load_passes(tile, valid_rows, [&](int) {
      const T* const of_pass = source;
      source += kRowsPerPass * row_stride;
      return of_pass;
    });
    source_ += kRows * row_stride;
  }

  // The same of rows that lie anywhere, whatever was loaded before: row i of the tile is
  // offset_of(i) elements from `matrix`. All lanes of a warp call together; each asks for one of
  // the warp's rows. offset_of is also asked for rows from valid_rows on, which are not read.
  template <typename OffsetOf>
  __device__ void load_scattered(uint32_t tile, int valid_rows, const T* matrix,
                                 OffsetOf offset_of) {
    constexpr int kWarpRows = 32 / kLanes;  // of a pass
    static_assert(kRows % kRowsPerPass == 0 && kRows / kRowsPerPass * kWarpRows <= 32);
    const int thread = ptx::opaque(thread_), lane = thread % 32;
    const int64_t offset =
        offset_of(lane / kWarpRows * kRowsPerPass + thread / 32 * kWarpRows + lane % kWarpRows);
    const T* const col = matrix + thread % kLanes * 8;
    load_passes(tile, valid_rows, [&](int pass) {
      return col + __shfl_sync(~0u, offset, pass / kRowsPerPass * kWarpRows + lane / kLanes);
    });
  }

 private:
  // source_of_pass(pass): the thread's first chunk of the pass; asked for in order.
  template <typename SourceOfPass>
  __device__ void load_passes(uint32_t tile, int valid_rows, SourceOfPass source_of_pass) const {
    const int thread = ptx::opaque(thread_);
    const int row = thread / kLanes;
    const int cols = cols_ - thread % kLanes * 8;  // valid ones from this thread's first on
    const uint32_t target = tile + Layout::offset(row, thread % kLanes);
    const auto load_pass = [&](int pass, auto copy) {
      if (kRows % kRowsPerPass != 0 && row + pass >= kRows) return;
      const bool valid_row = pass < valid_rows - row;
      const T* const source = source_of_pass(pass);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int col = group * kLanes * 8;
        copy(target + pass * Layout::kRowBytes + col * 2, source + col, valid_row && col < cols,
             cols - col);
      }
    };
    if (!kAnyAlignment || aligned_) {
#pragma unroll
      for (int pass = 0; pass < kRows; pass += kRowsPerPass) load_pass(pass, copy_aligned);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kRows; pass += kRowsPerPass) load_pass(pass, copy_elements);
    }
  }

  // Of a chunk: all of its columns are in the matrix, or some (`cols`, if fewer than 8).
  static __device__ void copy_aligned(uint32_t target, const T* source, bool valid, int) {
    ptx::cp_async_16_zfill(target, source, valid);
  }
  static __device__ void copy_elements(uint32_t target, const T* source, bool valid, int cols) {
    alignas(16) T chunk[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) chunk[i] = valid && i < cols ? source[i] : T(0.f);
    *static_cast<uint4*>(__cvta_shared_to_generic(target)) = *reinterpret_cast<uint4*>(chunk);
  }

  // What can be computed from these is not kept: registers are scarce where tiles are loaded.
  const int thread_;
  const int cols_;  // of the matrix
  const bool aligned_;
  const int64_t row_stride_;  // in elements
  const T* source_;           // this thread's first chunk of the next tile
};

// Writes accumulators of m16n8 (ptx/mma_sync.h), rounded to T, to a tile. Those of row tile m and
// column tile n go to row_tile(m) and col_tile(n), in units of 16 rows and 8 columns. kPositive: as
// pack.
template <int kCols, bool kPositive = false, typename T, int kRowTiles, int kColTiles,
          typename RowTile, typename ColTile>
__device__ void store_fragments(const float (&fragments)[kRowTiles][kColTiles][4], T* tile,
                                RowTile row_tile, ColTile col_tile, int lane) {
  auto* const bytes = reinterpret_cast<unsigned char*>(tile);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_tile(m) * 16 + half * 8 + lane / 4;
        const float* const pair = &fragments[m][n][2 * half];
        *reinterpret_cast<uint32_t*>(bytes + TileLayout<kCols>::offset(row, col_tile(n)) +
                                     lane % 4 * 4) = pack<kPositive>(pair[0], pair[1], T());
      }
    }
  }
}

// Copies the first valid_rows rows and cols columns of a (kRows, kCols) tile to global memory, by
// kThreads threads. `aligned` as in TileLoader.
template <int kRows, int kCols, int kThreads, bool kAnyAlignment, typename T>
__device__ void store_tile(const T* tile, T* target, int64_t row_stride, int valid_rows, int cols,
                           bool aligned, int thread) {
  using Layout = TileLayout<kCols>;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(tile);
#pragma unroll
  for (int i = 0; i < (kRows * Layout::kChunks + kThreads - 1) / kThreads; ++i) {
    const int item = i * kThreads + thread;
    const int row = item / Layout::kChunks, chunk = item % Layout::kChunks;
    if (row >= min(valid_rows, kRows) || chunk * 8 >= cols) continue;
    T* const place = target + row * row_stride + chunk * 8;
    const uint4 values = *reinterpret_cast<const uint4*>(bytes + Layout::offset(row, chunk));
    if (!kAnyAlignment || aligned) {
      *reinterpret_cast<uint4*>(place) = values;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < cols - chunk * 8) place[j] = reinterpret_cast<const T*>(&values)[j];
      }
    }
  }
}

}  // namespace flash::sm80
