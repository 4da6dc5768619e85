// A tile as a warp holds it: accumulators of m16n8 (ptx/mma_sync.h), (rows / 16, columns / 8).
#pragma once

namespace flash {

// What the rows of a tile of scores are.
enum class Rows {
  kQueries,  // S = Q K^T
  kKeys,     // S^T = K Q^T
};

// A score's place in its tile, or how far it is behind another.
struct Place {
  int query, key;
};

template <Rows kRows>
__device__ constexpr Place place_of(int row, int col) {
  return kRows == Rows::kQueries ? Place{row, col} : Place{col, row};
}

// Of place j in accumulator (m, n), behind the lane's first score.
template <Rows kRows>
__device__ constexpr Place place_behind(int m, int n, int j) {
  return place_of<kRows>(m * 16 + j / 2 * 8, n * 8 + j % 2);
}

// Calls function(element, m, n, j).
template <int kRowTiles, int kColTiles, typename Function>
__device__ void for_each(float (&x)[kRowTiles][kColTiles][4], Function function) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) function(x[m][n][j], m, n, j);
    }
  }
}

template <int kRowTiles, int kColTiles>
__device__ void clear(float (&x)[kRowTiles][kColTiles][4]) {
  for_each(x, [](float& element, int, int, int) { element = 0.f; });
}

template <int kRowTiles, int kColTiles>
__device__ void scale_by(float (&x)[kRowTiles][kColTiles][4], float factor) {
  for_each(x, [&](float& element, int, int, int) { element *= factor; });
}

}  // namespace flash
