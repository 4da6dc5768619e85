// From scores to probabilities in e4m3, as an operand of the second product.
#pragma once

#include <cstdint>

#include "common/softmax.h"
#include "ptx/cvt.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// Probabilities are multiplied by 1 / kProbabilityUnit: relative to its reference one may be 56, or
// four of them 14 each. What is below 2^-13 of the reference counts as 0.
constexpr float kLargestE4m3 = 448.f;
constexpr float kProbabilityBits = 3.f;
constexpr float kProbabilityUnit = 0x1p-3f;
constexpr float kFewReferences = 5.f / kProbabilityUnit;

// From scores as floats to exponents of 2: score * factor[r] + offset[r].
struct Exponents {
  float factor[2], offset[2];

  __device__ float of(float score, int r) const { return fmaf(score, factor[r], offset[r]); }
};

// Of a lane's two rows in a block: the sum of p' / kProbabilityUnit; the largest sum of four.
struct ProbabilitySums {
  float all[2], largest[2];
};

// P' = exp(S) relative to the rows' references, over kProbabilityUnit, in e4m3. Pairs of two
// neighbouring accumulators are a register of an A operand, if the values are in the order of
// scaled_blocks.cuh.
template <int kColTiles>
__device__ ProbabilitySums exponentiate_quantised(uint32_t (&p)[kColTiles / 4][4],
                                                  const SoftmaxState<1>& softmax,
                                                  const float (&scores)[1][kColTiles][4],
                                                  const Exponents& exponents) {
  ProbabilitySums sums{};
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    offset[r] = exponents.offset[r] + (kProbabilityBits - softmax.reference[r]);
  }
#pragma unroll
  for (int n = 0; n < kColTiles / 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2, tile = 4 * n + i / 2 * 2;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float score = scores[0][tile + j / 2][2 * r + j % 2];
        x[j] = ptx::ex2(fmaf(score, exponents.factor[r], offset[r]));
      }
      const float sum = (x[0] + x[1]) + (x[2] + x[3]);
      sums.all[r] += sum;
      sums.largest[r] = fmaxf(sums.largest[r], sum);
      p[n][i] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
    }
  }
  return sums;
}

}  // namespace flash::sm90
