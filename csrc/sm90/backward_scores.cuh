// From scores to gradients of scores, in the accumulators of a warp: keys are rows.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack.h"
#include "common/scores.h"
#include "common/with_condition.h"
#include "params.h"
#include "ptx/opaque.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// What a lane needs of a statistic in shared memory: of queries 8 n and 8 n + 1, from its first on.
template <int kColTiles>
__device__ void load_statistic(float2 (&x)[kColTiles], const float* statistic) {
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) x[n] = *reinterpret_cast<const float2*>(statistic + n * 8);
}

// P^T = exp(S^T - lse). p: S^T, accumulators of keys by queries; lse: in units of log 2
template <int kColTiles>
__device__ void exponentiate(float (&p)[1][kColTiles][4], const float2 (&lse)[kColTiles],
                             float scale_log2) {
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    const float2 pair = lse[n];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p[0][n][j] = ptx::ex2(fmaf(p[0][n][j], scale_log2, j % 2 == 0 ? -pair.x : -pair.y));
    }
  }
}

// dP^T becomes dS^T = P^T * (dP^T - delta), of one accumulator. kDrops: P is marked where dropout
// drops it.
template <bool kDrops>
__device__ void differentiate_scores(float (&ds)[4], const float (&p)[4], float2 delta) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float column_delta = j % 2 == 0 ? delta.x : delta.y;
    ds[j] = kDrops ? gradient_of_marked(p[j], ds[j], column_delta) : p[j] * (ds[j] - column_delta);
  }
}

// Accumulators, rounded, as the A operands of a product that sums over their columns. kPositive: as
// pack.
template <typename T, bool kPositive = false, int kSteps>
__device__ void pack_operands(uint32_t (&a)[kSteps][4], const float (&x)[1][2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&half)[4] = x[0][2 * k + i / 2];
      a[k][i] = pack<kPositive>(half[i % 2 * 2], half[i % 2 * 2 + 1], T());
    }
  }
}

// Operands become zero where x, of the same places, has a minus sign.
template <int kSteps>
__device__ void keep_operands(uint32_t (&a)[kSteps][4], const float (&x)[1][2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&half)[4] = x[0][2 * k + i / 2];
      const bool low = !signbit(half[i % 2 * 2]), high = !signbit(half[i % 2 * 2 + 1]);
      a[k][i] &= (low ? 0x0000ffffu : 0) | (high ? 0xffff0000u : 0);
    }
  }
}

// With a soft cap, without a mask: `operands` are P^T. S^T becomes P^T times the derivative of the
// score transform, a few scores at a time: there are no registers for the derivative of all.
// lse: in units of log 2; query, key: of the lane's first score
template <typename T, bool kBiased, int kSteps>
__device__ void capped_probabilities(float (&scores)[1][2 * kSteps][4],
                                     uint32_t (&operands)[kSteps][4],
                                     const ScoreTransform& transform, float scale_log2,
                                     const float2 (&lse)[2 * kSteps], int query, int key) {
  const float inner = transform.scale / transform.softcap;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      float capped[4], p[4];  // neighbouring queries, and those 8 behind
#pragma unroll
      for (int i = 0; i < 4; ++i) capped[i] = scores[0][2 * k + i / 2][j + i % 2] * inner;
      fast_tanh(capped);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, column = j + i % 2;
        const float penalty =
            kBiased ? transform.penalty<Rows::kKeys>(query, key, 0, n, column) : 0.f;
        const float shift = i % 2 == 0 ? lse[n].x : lse[n].y;
        p[i] = ptx::ex2(fmaf(capped[i] - penalty, scale_log2, -shift));
        // A rounding error may leave the derivative below zero.
        scores[0][n][column] = p[i] * fabsf(fmaf(-capped[i], capped[i], 1.f));
      }
      operands[k][j / 2] = pack(p[0], p[1], T());
      operands[k][2 + j / 2] = pack(p[2], p[3], T());
    }
  }
}

// What ALiBi and dropout need of a head. It is read once: the fences of those who add to dQ empty
// the L1 cache.
struct HeadOptions {
  float slope;
  uint32_t dropout_key;

  __device__ HeadOptions(const AttentionParams& params, int batch, int head)
      : slope(ScoreTransform::slope_of(params, batch, head)),
        dropout_key(Dropout::head_key_of(params, batch, head)) {}
};

// Of a warp's 16 keys by some queries: S^T becomes P^T, times the derivative of the score
// transform, marked where dropout drops it; `operands` are P^T with zeros there.
// lse: in units of log 2; query, key: the warp's first
template <typename T, bool kFull, int kSteps>
__device__ void scores_to_probabilities(float (&scores)[1][2 * kSteps][4],
                                        uint32_t (&operands)[kSteps][4],
                                        const BackwardParams& params, const Mask& mask,
                                        float scale_log2, const float2 (&lse)[2 * kSteps],
                                        const HeadOptions& head, int query, int key, int lane) {
  const int lane_query = query + lane % 4 * 2, lane_key = key + lane / 4;
  const bool cut = mask.cuts(query, kSteps * 16, key, 16);
  const auto mask_scores = [&] {
    apply_mask<Rows::kKeys>(
        scores, mask, [&](int, int upper) { return lane_key + upper * 8; }, lane_query);
  };
  const bool drops = kFull && params.rng_state != nullptr;
  const auto drop_scores = [&] {
    mark_dropped<Rows::kKeys>(scores, Dropout(params, head.dropout_key), query / 16, key / 16,
                              ptx::opaque(lane));
  };
  if constexpr (kFull) {
    const ScoreTransform transform(params, head.slope, mask.shift);
    if (transform.is_curved()) {
      if (transform.slope == 0.f) {
        capped_probabilities<T, false>(scores, operands, transform, scale_log2, lse, lane_query,
                                       lane_key);
      } else {
        capped_probabilities<T, true>(scores, operands, transform, scale_log2, lse, lane_query,
                                      lane_key);
      }
      if (drops) drop_scores();
      if (cut) mask_scores();
      if (cut || drops) keep_operands(operands, scores);
      if (cut) for_each(scores, [](float& x, int, int, int) { x = x == -INFINITY ? 0.f : x; });
      return;
    }
    transform.add_bias<Rows::kKeys>(scores, lane_query, lane_key);
  }
  if (cut) mask_scores();
  exponentiate(scores, lse, scale_log2);
  if (drops) drop_scores();
  pack_operands<T, kFull>(operands, scores);
}

}  // namespace flash::sm90
