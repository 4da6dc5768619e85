// From scores to gradients of scores, in the accumulators of a warp: keys are rows.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/pack.h"
#include "common/scores.h"
#include "params.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// Sets scores of invisible keys to -inf. query, key: the warp's first
template <int kColTiles>
__device__ void mask_scores(float (&scores)[1][kColTiles][4], const Mask& mask, int query, int key,
                            int lane) {
  if (!mask.cuts(query, kColTiles * 8, key, 16)) return;
  const int lane_key = key + lane / 4;
  apply_mask<Rows::kKeys>(
      scores, mask, [&](int, int upper) { return lane_key + upper * 8; }, query + lane % 4 * 2);
}

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

// dP^T becomes dS^T = P^T * (dP^T - delta).
template <int kColTiles>
__device__ void differentiate_scores(float (&ds)[1][kColTiles][4],
                                     const float (&p)[1][kColTiles][4],
                                     const float2 (&delta)[kColTiles]) {
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    const float2 pair = delta[n];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ds[0][n][j] = p[0][n][j] * (ds[0][n][j] - (j % 2 == 0 ? pair.x : pair.y));
    }
  }
}

// Accumulators, rounded, as the A operands of a product that sums over their columns.
template <typename T, int kSteps>
__device__ void pack_operands(uint32_t (&a)[kSteps][4], const float (&x)[1][2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&half)[4] = x[0][2 * k + i / 2];
      a[k][i] = pack(half[i % 2 * 2], half[i % 2 * 2 + 1], T());
    }
  }
}

// Which of a lane's scores dropout keeps: bit 4 * n + j.
template <int kColTiles>
__device__ uint32_t kept_bits(const Dropout& dropout, int query_tile, int key_tile, int lane) {
  static_assert(kColTiles <= 8);
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < kColTiles; n += 2) {
    const auto kept = dropout.kept<Rows::kKeys>(query_tile + n / 2, key_tile, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bits |= static_cast<uint32_t>(kept(i / 4, i % 4)) << (n * 4 + i);
    }
  }
  return bits;
}

// With a soft cap, of a warp's masked 16 keys by some queries: P^T as operands of dV, without what
// dropout drops. S^T becomes P^T times the derivative of the score transform: there are no
// registers for the derivative of all.
// lse: in units of log 2; kept: see kept_bits; query, key: of the lane's first score
template <typename T, int kSteps>
__device__ void capped_probabilities(float (&scores)[1][2 * kSteps][4],
                                     uint32_t (&operands)[kSteps][4],
                                     const ScoreTransform& transform,
                                     const float2 (&lse)[2 * kSteps], float scale_log2,
                                     uint32_t kept, int query, int key) {
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
        float& score = scores[0][n][column];
        const float biased = capped[i] - transform.penalty<Rows::kKeys>(query, key, 0, n, column);
        const float shift = i % 2 == 0 ? lse[n].x : lse[n].y;
        p[i] = score == -INFINITY ? 0.f : ptx::ex2(fmaf(biased, scale_log2, -shift));
        score = p[i] * (1.f - capped[i] * capped[i]);
        if ((kept >> (n * 4 + column) & 1) == 0) p[i] = 0.f;
      }
      operands[k][j / 2] = pack(p[0], p[1], T());
      operands[k][2 + j / 2] = pack(p[2], p[3], T());
    }
  }
}

}  // namespace flash::sm90
