// Softmax over rows whose scores arrive block by block, with a search for maxima in the first
// alone.
//
// Later the exponentials are taken relative to the old reference, and their sums, which are needed
// anyway, tell whether the scores have outgrown it. Only then, a few times a row, the reference
// becomes the maximum, what came before is rescaled to it and the block is done again.
#pragma once

#include <cstdint>

#include "common/pack.h"
#include "common/softmax.h"

namespace flash::sm90 {

// What a lane's sum over a block may be: far from the largest float16.
constexpr float kLargestSum = 256.f;

// P = exp(S) relative to the rows' references, rounded to T; returns this lane's sum over each row.
// Two neighbouring accumulators are then an A operand: no data moves between lanes.
// dropped_of_block(n, lane): what dropout drops of the probabilities [2 n], [2 n + 1]
// (DroppedOfBlock or NothingDropped)
template <typename T, int kColTiles, typename DroppedOf>
__device__ float2 exponentiate_scores(uint32_t (&p)[kColTiles / 2][4],
                                      const SoftmaxState<1>& softmax,
                                      const float (&scores)[1][kColTiles][4], int lane,
                                      DroppedOf dropped_of_block) {
  float sums[2] = {};
#pragma unroll
  for (int n = 0; n < kColTiles / 2; ++n) {
    const auto dropped = dropped_of_block(n, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = i % 2 * 2, row = i % 2;
      const float* const pair = &scores[0][2 * n + i / 2][j];
      const float low = softmax.power(pair[0], row), high = softmax.power(pair[1], row);
      sums[row] += low;
      sums[row] += high;
      p[n][i] = dropped.keep(pack(low, high, T()), i / 2, j);
    }
  }
  return make_float2(sums[0], sums[1]);
}

// Where scores have outgrown a row's reference in some lane of the quad, it becomes their maximum.
// Each row decides for itself, so that its result does not depend on its neighbours.
// exponent_of(score, r): of 2, of a score in row r
// factors: what the output of the rows' blocks so far is to be multiplied by
template <int kColTiles, typename ExponentOf>
__device__ void raise_references(SoftmaxState<1>& softmax, const bool (&outgrown)[2],
                                 const float (&scores)[1][kColTiles][4], float (&factors)[2],
                                 ExponentOf exponent_of) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_max = -INFINITY;
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      row_max = fmaxf(row_max, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
    }
    const float scaled_max = exponent_of(quad_max(row_max), r);
    const bool raise = quad_max(outgrown[r] ? 1.f : 0.f) > 0.f && scaled_max > softmax.reference[r];
    factors[r] = softmax.raise_reference(raise, r, scaled_max);
  }
}

// The same, and rescales the output.
template <int kColTiles, int kOutTiles, typename ExponentOf>
__device__ void raise_references(SoftmaxState<1>& softmax, const bool (&outgrown)[2],
                                 const float (&scores)[1][kColTiles][4],
                                 float (&out)[1][kOutTiles][4], ExponentOf exponent_of) {
  float factors[2];
  raise_references(softmax, outgrown, scores, factors, exponent_of);
  rescale_output(out, factors);
}

// The probabilities of the next block of scores, whose sums join the rows'. kFirst: it is the
// first, and `out` is zero.
template <typename T, bool kFirst, int kColTiles, int kOutTiles, typename DroppedOf>
__device__ void softmax_step(uint32_t (&p)[kColTiles / 2][4], SoftmaxState<1>& softmax,
                             const float (&scores)[1][kColTiles][4], float (&out)[1][kOutTiles][4],
                             int lane, DroppedOf dropped_of_block) {
  const auto exponent_of = [&](float score, int) { return score * softmax.scale_log2; };
  if constexpr (kFirst) {
    float nothing[1][1][4] = {};  // in place of `out`, which need not be rescaled
    raise_references(softmax, {true, true}, scores, nothing, exponent_of);
  }
  float2 sums = exponentiate_scores<T>(p, softmax, scores, lane, dropped_of_block);
  if constexpr (!kFirst) {
    const bool outgrown[2] = {!(sums.x <= kLargestSum), !(sums.y <= kLargestSum)};  // NaN too
    if (__any_sync(0xffffffff, outgrown[0] || outgrown[1])) {
      raise_references(softmax, outgrown, scores, out, exponent_of);
      // (The shuffle, of its own lane, hides that the dropout mask has been computed before: it had
      // better be computed once more than be remembered.)
      sums = exponentiate_scores<T>(p, softmax, scores, __shfl_sync(0xffffffff, lane, lane),
                                    dropped_of_block);
    }
  }
  softmax.sum[0] += sums.x;
  softmax.sum[1] += sums.y;
}

}  // namespace flash::sm90
