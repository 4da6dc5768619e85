// Softmax over rows whose scores arrive block by block ("online": Milakov and Gimelshein 2018,
// arXiv:1805.02867; the rescaled output is FlashAttention's, arXiv:2205.14135).
#pragma once

#include <cfloat>
#include <cmath>

#include "common/fragment.h"
#include "ptx/special_functions.h"

namespace flash {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Exponentials are taken relative to a maximum that may lag behind by this many powers of 2. The
// output is then rescaled a few times a row instead of at every step, and what replaces
// probabilities until the end stays below 2^8, far from the largest float16.
constexpr float kRescaleThreshold = 8.f;

// Reductions over the four lanes that share the rows of an mma accumulator.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// A warp that has its rows for itself.
struct WarpTeam {
  // Whether `outgrown` is true in any lane of the team. If so, row_max, one value for each row that
  // the lane holds, becomes the maximum over all lanes that share the row.
  template <int kRows>
  __device__ bool agree(bool outgrown, float (&row_max)[kRows]) const {
    if (!__any_sync(0xffffffff, outgrown)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = quad_max(row_max[r]);
    return true;
  }

  // Over all lanes that share a row.
  template <int kRows>
  __device__ void sum(float (&x)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = quad_sum(x[r]);
  }
};

// Running state of the rows that a lane holds: row 2 * m + half is row g + 8 * half of accumulator
// m (ptx/mma_sync.h).
template <int kRowTiles>
struct SoftmaxState {
  static constexpr int kRows = 2 * kRowTiles;

  float scale_log2;  // turns scores into exponents of 2: scale_log2_of
  // What the exponents of 2 are relative to; one value in the whole quad. It starts finite, so that
  // a row without a visible key meets no -inf - -inf.
  float reference[kRows];
  float sum[kRows];  // of this lane's exponentials

  // An attention sink is one more score of a row, exp(sink) joins its sum (-inf: no sink). It
  // counts in one of the lanes that share a row, `counts_sink`. The reference is as far below it as
  // it may be: relative to the sink, many small probabilities would be below the least float16.
  __device__ SoftmaxState(float scale_log2, const float (&sinks)[kRows], bool counts_sink)
      : scale_log2(scale_log2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      constexpr float kSinkSum = 1 << static_cast<int>(kRescaleThreshold);
      const float below = sinks[r] * kLog2e - kRescaleThreshold;
      reference[r] = below < -FLT_MAX ? -FLT_MAX : below;  // NaN stays
      sum[r] = counts_sink && reference[r] != -FLT_MAX ? kSinkSum : 0.f;
    }
  }

  // Unnormalized probability of a score in row r.
  __device__ float power(float score, int r) const {
    return ptx::ex2(fmaf(score, scale_log2, -reference[r]));
  }

  // The same for accumulator m, place j (0..3); it joins the row's sum.
  __device__ float exponentiate(float score, int m, int j) {
    const int r = 2 * m + j / 2;
    const float p = power(score, r);
    sum[r] += p;
    return p;
  }

  // Raises row r's reference, if `raise`; returns what the row's output is to be multiplied by.
  __device__ float raise_reference(bool raise, int r, float scaled_max) {
    const float factor = raise ? ptx::ex2(reference[r] - scaled_max) : 1.f;
    if (raise) reference[r] = scaled_max;
    sum[r] *= factor;
    return factor;
  }
};

// Looks for the maxima of the next block of scores: where one has outgrown a row's reference, the
// reference rises and the sum is rescaled to it. Whether any row of the team did; then `out` wants
// rescale_output with the factors. The exponentials are left to `exponentiate`.
// scores: (kRowTiles, kScoreTiles) accumulators of m16n8
// team: the lanes that share rows
template <int kRowTiles, int kScoreTiles, typename Team>
__device__ bool follow_maxima(SoftmaxState<kRowTiles>& state,
                              const float (&scores)[kRowTiles][kScoreTiles][4],
                              float (&factors)[2 * kRowTiles], const Team& team) {
  constexpr int kRows = 2 * kRowTiles;
  float row_max[kRows];  // of this lane's scores, later of the whole row
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int m = r / 2, j = r % 2 * 2;
    row_max[r] = -INFINITY;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      row_max[r] = fmaxf(row_max[r], fmaxf(scores[m][n][j], scores[m][n][j + 1]));
    }
    outgrown |= fmaf(row_max[r], state.scale_log2, -state.reference[r]) > kRescaleThreshold;
  }
  if (!team.agree(outgrown, row_max)) return false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float scaled_max = row_max[r] * state.scale_log2;
    // Each row decides for itself, so that its result does not depend on its neighbours.
    const bool raise = scaled_max - state.reference[r] > kRescaleThreshold;
    factors[r] = state.raise_reference(raise, r, scaled_max);
  }
  return true;
}

// out: (kRowTiles, kOutTiles) accumulators of m16n8
template <int kRowTiles, int kOutTiles>
__device__ void rescale_output(float (&out)[kRowTiles][kOutTiles][4],
                               const float (&factors)[2 * kRowTiles]) {
  for_each(out, [&](float& x, int m, int, int j) { x *= factors[2 * m + j / 2]; });
}

// The end of a row: what its output is to be multiplied by, `scale` over the row's sum (no visible
// key and no sink: 0), and its natural log-sum-exp (then -inf).
struct RowEnd {
  float factor, lse;
};
__device__ inline RowEnd end_of_row(float reference, float sum, float scale) {
  if (sum == 0.f) return {0.f, -INFINITY};
  return {__fdividef(scale, sum), (reference + __log2f(sum)) * kLn2};
}

// The ends of all rows; the same in all lanes that share one.
template <int kRowTiles, typename Team>
__device__ void finish_rows(SoftmaxState<kRowTiles>& state, float scale,
                            float (&factors)[2 * kRowTiles], float (&lse)[2 * kRowTiles],
                            const Team& team) {
  team.sum(state.sum);
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    // The sum is 0, or at least 1: the reference is a score's own or below the sink.
    const RowEnd end = end_of_row(state.reference[r], state.sum[r], scale);
    factors[r] = end.factor;
    lse[r] = end.lse;
  }
}

}  // namespace flash
