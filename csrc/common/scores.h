// From Q K^T to scores: S = scale * Q K^T, soft-capped, biased by ALiBi. They are kept in units of
// the soft cap or, without one, of the scale: the softmax multiplies by it at no cost.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/fragment.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/special_functions.h"

namespace flash {

// What turns scores into exponents of 2. A scale of zero would turn the -inf of a masked score into
// NaN; the least scale gives all visible keys equal weight, as zero, and leaves room for ALiBi.
// unit: what Q K^T is to be multiplied by, beside the scale
__host__ __device__ inline float scale_log2_of(const AttentionParams& params, float unit = 1.f) {
  constexpr float kLeast = 0x1p-100f;
  const float scale = params.softcap > 0.f ? params.softcap : params.softmax_scale * unit;
  return fmaxf(scale * kLog2e, kLeast);
}

// x = tanh(x) = 1 - 2 / (exp(2x) + 1), right to 1e-7 in absolute terms, which is what a soft cap
// needs (tanh.approx has 5e-4). Four share one division: the special-function unit is the limit.
// NaN stays NaN and does not spread, but the last bit depends on all four.
__device__ inline void fast_tanh(float (&x)[4]) {
  float y[4];  // exp(2x) + 1; 2^30 is as good as infinity, and four of them have a float's range
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = ptx::ex2(fminf(2.f * kLog2e * x[i], 30.f)) + 1.f;
  const float low = y[0] * y[1], high = y[2] * y[3], inverse = -2.f * ptx::rcp(low * high);
  const float inverse_low = inverse * high, inverse_high = inverse * low;
  const float inverses[4] = {inverse_low * y[1], inverse_low * y[0], inverse_high * y[3],
                             inverse_high * y[2]};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = isnan(x[i]) ? x[i] : 1.f + inverses[i];
}

// The scores of one head of one sequence.
struct ScoreTransform {
  float scale, softcap;
  float slope;  // of ALiBi, in units of the scores; 0 without
  int shift;    // query i stands at key i + shift, to ALiBi

  // unit: as of scale_log2_of
  __device__ ScoreTransform(const AttentionParams& params, int batch, int head, int shift,
                            float unit = 1.f)
      : ScoreTransform(params, slope_of(params, batch, head, unit), shift, unit) {}
  // Of a head whose slope is known.
  __device__ ScoreTransform(const AttentionParams& params, float slope, int shift, float unit = 1.f)
      : scale(params.softmax_scale * unit),
        softcap(params.softcap),
        slope(slope),
        shift(shift + params.place_shift) {}

  // Reads memory.
  static __device__ float slope_of(const AttentionParams& params, int batch, int head,
                                   float unit = 1.f) {
    if (params.alibi_slopes == nullptr) return 0.f;
    const float slope = params.alibi_slopes[batch * params.alibi_batch_stride + head] *
                        __fdividef(kLog2e, scale_log2_of(params, unit));
    // Infinity times distance 0 would be NaN; what is NaN stays.
    return slope < -FLT_MAX ? -FLT_MAX : slope > FLT_MAX ? FLT_MAX : slope;
  }

  // Whether its derivative is not 1 everywhere.
  __device__ bool is_curved() const { return softcap > 0.f; }

  // Of Q K^T or K Q^T. `query` and `key` are those of the lane's first score. `mask_scores()` makes
  // those of invisible keys -inf; it is left to the caller to do that once more. If the transform
  // is curved, `on_derivative(m, n, j, derivative)` sees its derivative at each score. scores:
  // (kRowTiles, kColTiles) accumulators of m16n8 (ptx/mma_sync.h)
  template <Rows kRows = Rows::kQueries, int kRowTiles, int kColTiles, typename MaskScores,
            typename OnDerivative>
  __device__ void apply(float (&scores)[kRowTiles][kColTiles][4], int query, int key,
                        MaskScores mask_scores, OnDerivative on_derivative) const {
    if (softcap <= 0.f && slope == 0.f) return;
    // One loop for each option: a test inside would be a branch at every score.
    if (softcap > 0.f) {
      const float inner = scale / softcap;
      for_each(scores, [&](float& score, int, int, int) { score *= inner; });
      // Four of one row of the tile, none of them from beyond the sequence.
      mask_scores();
#pragma unroll
      for (int i = 0; i < kRowTiles * kColTiles; ++i) {
        auto& tiles = scores[i / kColTiles];
        const int n = i % kColTiles / 2 * 2, j = i % 2 * 2;
        float four[4] = {tiles[n][j], tiles[n][j + 1], tiles[n + 1][j], tiles[n + 1][j + 1]};
        fast_tanh(four);
        tiles[n][j] = four[0], tiles[n][j + 1] = four[1];
        tiles[n + 1][j] = four[2], tiles[n + 1][j + 1] = four[3];
      }
      for_each(scores, [&](float& score, int m, int n, int j) {
        on_derivative(m, n, j, 1.f - score * score);
      });
    }
    add_bias<kRows>(scores, query, key);
  }

  // ALiBi alone.
  template <Rows kRows = Rows::kQueries, int kRowTiles, int kColTiles>
  __device__ void add_bias(float (&scores)[kRowTiles][kColTiles][4], int query, int key) const {
    if (slope == 0.f) return;
    for_each(scores, [&](float& score, int m, int n, int j) {
      score -= penalty<kRows>(query, key, m, n, j);
    });
  }

  // What ALiBi takes from a score.
  template <Rows kRows>
  __device__ float penalty(int query, int key, int m, int n, int j) const {
    const Place behind = place_behind<kRows>(m, n, j);
    const auto distance = static_cast<float>(key - query - shift);  // of the first score
    return slope * fabsf(distance + static_cast<float>(behind.key - behind.query));
  }
};

}  // namespace flash
