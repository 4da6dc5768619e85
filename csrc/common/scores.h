// From Q K^T to scores: S = scale * Q K^T, soft-capped, biased by ALiBi.
#pragma once

#include <cmath>

#include "common/softmax.h"
#include "params.h"
#include "ptx/ex2.h"

namespace flash {

// 1 - 2 / (exp(2x) + 1): right to 1e-7 in absolute terms, which is what a soft cap needs.
// (tanh.approx has 5e-4.)
__device__ inline float fast_tanh(float x) {
  return 1.f - __fdividef(2.f, ptx::ex2(2.f * kLog2e * x) + 1.f);
}

// The scores of one head of one sequence.
struct ScoreTransform {
  float scale, softcap;
  float slope;  // of ALiBi; 0 without
  int shift;    // query i stands at key i + shift

  __device__ ScoreTransform(const AttentionParams& params, int batch, int head, int shift)
      : scale(params.softmax_scale),
        softcap(params.softcap),
        slope(params.alibi_slopes == nullptr
                  ? 0.f
                  : params.alibi_slopes[batch * params.alibi_batch_stride + head]),
        shift(shift) {}

  // `row` and `key` are those of the thread's first score. `on_softcap(m, n, j, derivative)` sees
  // the derivative of the soft cap at each score.
  // scores: (kRowTiles, kColTiles) accumulators of m16n8 (ptx/mma_sync.h)
  template <int kRowTiles, int kColTiles, typename OnSoftcap>
  __device__ void apply(float (&scores)[kRowTiles][kColTiles][4], int row, int key,
                        OnSoftcap on_softcap) const {
    // One loop for each option: a test inside would be a branch at every score.
    if (softcap > 0.f) {
      const float inner = scale / softcap;
      for_each(scores, [&](float& score, int m, int n, int j) {
        const float bounded = fast_tanh(score * inner);
        score = softcap * bounded;
        on_softcap(m, n, j, 1.f - bounded * bounded);
      });
    } else {
      for_each(scores, [&](float& score, int, int, int) { score *= scale; });
    }
    if (slope != 0.f) {
      const auto distance = static_cast<float>(key - row - shift);  // of the first score
      for_each(scores, [&](float& score, int m, int n, int j) {
        score -= slope * fabsf(distance + static_cast<float>(n * 8 + j % 2 - m * 16 - j / 2 * 8));
      });
    }
  }

 private:
  template <int kRowTiles, int kColTiles, typename Function>
  __device__ static void for_each(float (&scores)[kRowTiles][kColTiles][4], Function function) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) function(scores[m][n][j], m, n, j);
      }
    }
  }
};

}  // namespace flash
