// Softmax over rows whose scores arrive block by block ("online": Milakov and Gimelshein 2018,
// arXiv:1805.02867; the rescaled output is FlashAttention's, arXiv:2205.14135).
#pragma once

#include <cfloat>
#include <cmath>

#include "ptx/ex2.h"

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

// Running state of the rows that a lane holds: row 2 * m + half is row g + 8 * half of accumulator
// m (ptx/mma_sync.h).
template <int kRowTiles>
struct SoftmaxState {
  static constexpr int kRows = 2 * kRowTiles;

  // softmax_scale * log2(e): exponentials are powers of 2. A scale of zero would turn the -inf of a
  // masked score into NaN; the smallest normal float gives all visible keys equal weight, as zero.
  float scale_log2;
  // Maximum of the scaled scores, up to kRescaleThreshold; one value in the whole quad. It starts
  // finite, so that a row without a visible key meets no -inf - -inf.
  float reference[kRows];
  float sum[kRows];  // of this lane's exponentials

  __device__ explicit SoftmaxState(float softmax_scale)
      : scale_log2(fmaxf(softmax_scale * kLog2e, FLT_MIN)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -FLT_MAX;
      sum[r] = 0.f;
    }
  }

  // Unnormalized probability of a score of accumulator m, place j (0..3); it joins the row's sum.
  __device__ float exponentiate(float score, int m, int j) {
    const int r = 2 * m + j / 2;
    const float p = ptx::ex2(fmaf(score, scale_log2, -reference[r]));
    sum[r] += p;
    return p;
  }
};

// Takes notice of the next block of scores S = Q K^T: where their maximum has outgrown a row's
// reference, the reference rises and what `out` has accumulated is rescaled to it. The exponentials
// are left to `exponentiate`, beside the matmul that needs them.
// scores: (kRowTiles, kScoreTiles), out: (kRowTiles, kOutTiles) accumulators of m16n8
template <int kRowTiles, int kScoreTiles, int kOutTiles>
__device__ void online_softmax_step(SoftmaxState<kRowTiles>& state,
                                    const float (&scores)[kRowTiles][kScoreTiles][4],
                                    float (&out)[kRowTiles][kOutTiles][4]) {
  constexpr int kRows = 2 * kRowTiles;
  float lane_max[kRows];
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int m = r / 2, j = r % 2 * 2;
    lane_max[r] = -INFINITY;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      lane_max[r] = fmaxf(lane_max[r], fmaxf(scores[m][n][j], scores[m][n][j + 1]));
    }
    outgrown |= fmaf(lane_max[r], state.scale_log2, -state.reference[r]) > kRescaleThreshold;
  }
  if (!__any_sync(0xffffffff, outgrown)) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int m = r / 2, j = r % 2 * 2;
    const float scaled_max = quad_max(lane_max[r]) * state.scale_log2;
    // Each row decides for itself, so that its result does not depend on its neighbours.
    if (scaled_max - state.reference[r] > kRescaleThreshold) {
      const float rescale = ptx::ex2(state.reference[r] - scaled_max);
      state.reference[r] = scaled_max;
      state.sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[m][n][j] *= rescale;
        out[m][n][j + 1] *= rescale;
      }
    }
  }
}

// Divides `out` by the row sums (no visible key: 0) and gives the natural log-sum-exp of each row
// (no visible key: -inf), the same in the whole quad. out: (kRowTiles, kOutTiles) accumulators of
// m16n8
template <int kRowTiles, int kOutTiles>
__device__ void normalize_output(const SoftmaxState<kRowTiles>& state,
                                 float (&out)[kRowTiles][kOutTiles][4],
                                 float (&lse)[2 * kRowTiles]) {
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const int m = r / 2, j = r % 2 * 2;
    const float sum = quad_sum(state.sum[r]);  // 0, or at least 1: the reference is a score's own
    const float inverse = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    lse[r] = sum == 0.f ? -INFINITY : (state.reference[r] + __log2f(sum)) * kLn2;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      out[m][n][j] *= inverse;
      out[m][n][j + 1] *= inverse;
    }
  }
}

}  // namespace flash
