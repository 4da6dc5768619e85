// The warps that share rows of queries: each takes its part of the keys in the first matmul and its
// part of the output's columns in the second.
#pragma once

#include <cmath>

#include "common/softmax.h"
#include "ptx/named_barrier.h"

namespace flash::sm80 {

template <int kWarps>
struct RowTeam;

template <>
struct RowTeam<1> : WarpTeam {
  static constexpr int rank = 0;

  __device__ void wait() const {}

  // Where the n-th 8 columns of a warp's output are, in units of 8.
  __device__ int col_tile(int n) const { return n; }
};

// Two warps. Between two calls of agree or sum they meet elsewhere (wait), so that what they gave
// each other has been read before it is overwritten.
template <>
struct RowTeam<2> {
  int rank;         // 0 or 1
  int barrier;      // id
  float* exchange;  // (2, rows of the team)
  int lane;

  __device__ void wait() const { ptx::bar_sync(barrier, 64); }

  // As above: of each two blocks of 16 columns, each warp has one.
  __device__ int col_tile(int n) const { return (n / 2 * 2 + rank) * 2 + n % 2; }

  // As above, but a warp in which no lane's `outgrown` is true does not contribute to the maximum.
  template <int kRows>
  __device__ bool agree(bool outgrown, float (&row_max)[kRows]) const {
    static_assert(kRows * 8 <= 32);
    outgrown = __any_sync(0xffffffff, outgrown);
    if (outgrown) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) row_max[r] = quad_max(row_max[r]);
      give(row_max);
    } else if (lane < kRows * 8) {
      exchange[rank * kRows * 8 + lane] = -INFINITY;
    }
    if (!ptx::bar_any(barrier, 64, outgrown)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = fmaxf(given<kRows>(0, r), given<kRows>(1, r));
    return true;
  }

  template <int kRows>
  __device__ void sum(float (&x)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = quad_sum(x[r]);
    give(x);
    wait();
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] += given<kRows>(1 - rank, r);
  }

 private:
  template <int kRows>
  __device__ void give(const float (&mine)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (lane % 4 == 0) exchange[(rank * kRows + r) * 8 + lane / 4] = mine[r];
    }
  }
  template <int kRows>
  __device__ float given(int giver, int r) const {
    return exchange[(giver * kRows + r) * 8 + lane / 4];
  }
};

}  // namespace flash::sm80
