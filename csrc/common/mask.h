// Which keys each query sees, for whole blocks and for single scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/fragment.h"
#include "common/range.h"

namespace flash {

// Full, causal and sliding-window attention over one sequence. The diagonal ends in the
// bottom-right corner: query i stands at key i + shift.
struct Mask {
  int seqlen_k;
  int shift;                      // seqlen_k - seqlen_q
  int window_left, window_right;  // bounded_window (host/launch.h) of each side

  // Query i sees the keys first_key(i) .. end_key(i) - 1. Both bounds grow with i.
  __device__ int first_key(int i) const { return max(0, i + shift - window_left); }
  __device__ int end_key(int i) const { return min(seqlen_k, i + shift + window_right + 1); }

  // Key j of the sequence is seen by the queries first_query(j) .. end_query(j) - 1, as far as
  // there are any. Both bounds grow with j.
  __host__ __device__ int first_query(int j) const { return max(0, j - shift - window_right); }
  __host__ __device__ int end_query(int j) const { return j - shift + window_left + 1; }

  // A row of a tile of scores sees the columns first_column(row) .. end_column(row) - 1.
  template <Rows kRows>
  __device__ int first_column(int row) const {
    return kRows == Rows::kQueries ? first_key(row) : first_query(row);
  }
  template <Rows kRows>
  __device__ int end_column(int row) const {
    return kRows == Rows::kQueries ? end_key(row) : row < seqlen_k ? end_query(row) : 0;
  }

  // Whether some query of row .. row + rows - 1 misses some key of key .. key + keys - 1.
  __device__ bool cuts(int row, int rows, int key, int keys) const {
    return key + keys > seqlen_k || key + keys > row + shift + window_right + 1 ||
           key < row + rows - 1 + shift - window_left;
  }
};

// The blocks of kBlockN keys in which one of the queries row_begin .. row_end - 1 sees a key.
template <int kBlockN>
__device__ Range key_blocks(const Mask& mask, int row_begin, int row_end) {
  return {mask.first_key(row_begin) / kBlockN, (mask.end_key(row_end - 1) + kBlockN - 1) / kBlockN};
}

// The blocks of kBlockM queries of which one sees a key of key_begin .. key_end - 1: those whose
// key_blocks, with blocks of key_end - key_begin keys, hold these keys.
template <int kBlockM>
__host__ __device__ Range query_blocks(const Mask& mask, int seqlen_q, int key_begin, int key_end) {
  const int end = min(seqlen_q, mask.end_query(key_end - 1));
  return {mask.first_query(key_begin) / kBlockM, (end + kBlockM - 1) / kBlockM};
}

// Of 2 * kColTiles columns, pairs 8 apart from column 0 on, as a lane holds them in a row of
// accumulators: a bit for each that is below `end`.
template <int kColTiles>
__device__ inline uint32_t columns_below(int end) {
  const int bounded = min(max(end, 0), kColTiles * 8);
  const int count = bounded / 8 * 2 + min(bounded % 8, 2);
  return __funnelshift_lc(0, 1, count) - 1;  // 1 << 32 is 0
}

// Sets scores to -inf where the key is invisible to the query. row_of(m, half): the query or key of
// row 8 * half of accumulator m that the lane has; `col`: the key or query of its first column.
// scores: (kRowTiles, kColTiles) accumulators of m16n8 (ptx/mma_sync.h)
template <Rows kRows = Rows::kQueries, int kRowTiles, int kColTiles, typename RowOf>
__device__ void apply_mask(float (&scores)[kRowTiles][kColTiles][4], const Mask& mask, RowOf row_of,
                           int col) {
  constexpr int kGroup = kColTiles < 16 ? kColTiles : kColTiles % 16 == 0 ? 16 : kColTiles / 2;
  static_assert(kColTiles % kGroup == 0);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half);
#pragma unroll
      for (int group = 0; group < kColTiles; group += kGroup) {
        const int begin = mask.first_column<kRows>(row) - col - group * 8;
        const int end = mask.end_column<kRows>(row) - col - group * 8;
        const uint32_t visible = columns_below<kGroup>(end) & ~columns_below<kGroup>(begin);
#pragma unroll
        for (int i = 0; i < kGroup * 2; ++i) {
          float& score = scores[m][group + i / 2][2 * half + i % 2];
          score = visible >> i & 1 ? score : -INFINITY;
        }
      }
    }
  }
}

}  // namespace flash
