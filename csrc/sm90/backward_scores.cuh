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

// A warp's 16 keys by some queries, in place: softcap and ALiBi if kFull, then the mask.
// slopes: written if it returns true, by how much the transformed scores change with the scores
// query, key: the warp's first
template <bool kFull, int kColTiles, int kSlopeTiles>
__device__ bool transform_scores(float (&scores)[1][kColTiles][4],
                                 float (&slopes)[1][kSlopeTiles][4], const BackwardParams& params,
                                 const Mask& mask, int batch, int head, int query, int key,
                                 int lane) {
  const int lane_query = query + lane % 4 * 2, lane_key = key + lane / 4;
  const auto mask_scores = [&] {
    if (!mask.cuts(query, kColTiles * 8, key, 16)) return;
    apply_mask<Rows::kKeys>(
        scores, mask, [&](int, int upper) { return lane_key + upper * 8; }, lane_query);
  };
  bool curved = false;
  if constexpr (kFull) {
    const ScoreTransform transform(params, batch, head, mask.shift);
    curved = transform.is_curved();
    transform.apply<Rows::kKeys>(
        scores, lane_query, lane_key, mask_scores,
        [&](int m, int n, int j, float slope) { slopes[m][n][j] = slope; });
  }
  mask_scores();
  return curved;
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

}  // namespace flash::sm90
