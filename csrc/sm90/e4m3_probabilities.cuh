// From scores to probabilities in e4m3, as an operand of the second product.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "common/pack.h"
#include "common/softmax.h"
#include "ptx/cvt.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// From scores as floats to exponents of 2: score * factor[r] + offset[r].
struct Exponents {
  float factor[2], offset[2];

  __device__ float of(float score, int r) const { return fmaf(score, factor[r], offset[r]); }

  // Of scale * (exponent + bits - reference). (Of a row that has seen no key the reference is the
  // least float: what follows from it shall stay finite.)
  __device__ Exponents relative_to(const SoftmaxState<1>& softmax, float scale, float bits) const {
    Exponents relative;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      relative.factor[r] = scale * factor[r];
      const float reference = fmaxf(softmax.reference[r], -FLT_MAX / 16);
      relative.offset[r] = scale * (offset[r] + (bits - reference));
    }
    return relative;
  }
};

// Calls encode(n, i, r, x) for each register of P, an A operand: four exponents of row r for
// p[n][i]. Pairs of two neighbouring accumulators are a register, if the values are in the order of
// scaled_blocks.cuh.
template <int kColTiles, typename Encode>
__device__ void for_each_four(const float (&scores)[1][kColTiles][4], const Exponents& exponents,
                              Encode encode) {
#pragma unroll
  for (int n = 0; n < kColTiles / 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2, tile = 4 * n + i / 2 * 2;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = exponents.of(scores[0][tile + j / 2][2 * r + j % 2], r);
      }
      encode(n, i, r, x);
    }
  }
}

// P' = exp(S) relative to the rows' references, times 2^kBits, in two ways. Both say whether a row
// has outgrown its reference: e4m3 ends at 448.

// Rounded to the nearest e4m3. The rows sum what is rounded.
template <int kColTiles, int kBits_>
struct RoundedProbabilities {
  static constexpr int kBits = kBits_;
  static constexpr bool kSummed = true;         // or products with ones do it
  static constexpr bool kBesideOutput = false;  // computed while P V of the block before is
  float sums[2];                                // of this lane's, times 2^kBits

  __device__ RoundedProbabilities(const SoftmaxState<1>& softmax,
                                  const float (&scores)[1][kColTiles][4],
                                  const Exponents& exponents)
      : sums{}, largest_(0.f) {
    for_each_four(scores, exponents.relative_to(softmax, 1.f, kBits),
                  [&](int n, int i, int r, const float (&x)[4]) {
                    float y[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) y[j] = ptx::ex2(x[j]);
                    const float sum = (y[0] + y[1]) + (y[2] + y[3]);
                    sums[r] += sum;
                    largest_ = fmaxf(largest_, sum);
                    p_[n][i] = ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
                  });
  }

  __device__ bool outgrown() const { return largest_ > 448.f; }

  __device__ void store(uint32_t (&p)[kColTiles / 4][4]) const {
#pragma unroll
    for (int n = 0; n < kColTiles / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = p_[n][i];
    }
  }

 private:
  float largest_;  // sum of four
  uint32_t p_[kColTiles / 4][4];
};

// Without the special-function unit: the code of a number of e4m3 is a multiple of its logarithm,
// but for the mantissa, which is linear between powers of two. So the exponent, times 8 and
// rounded, is taken for the code. Its error is 3.1 % where rounding to e4m3 has 2.6.
template <int kColTiles, bool kBesideOutput_>
struct LinearProbabilities {
  static constexpr int kBits = 6;
  static constexpr bool kSummed = false;
  static constexpr bool kBesideOutput = kBesideOutput_;

  __device__ LinearProbabilities(const SoftmaxState<1>& softmax,
                                 const float (&scores)[1][kColTiles][4], const Exponents& exponents)
      : largest_(0) {
    for_each_four(scores, exponents.relative_to(softmax, kSteps, kBits + kBias),
                  [&](int n, int i, int, const float (&x)[4]) {
                    const uint32_t low = codes_of(x[0], x[1]), high = codes_of(x[2], x[3]);
                    largest_ = __vimax3_u16x2(largest_, low, high);
                    codes_[n][i][0] = low;
                    codes_[n][i][1] = high;
                  });
  }

  __device__ bool outgrown() const {
    return max(largest_ & 0xffff, largest_ >> 16) > kWholeBits + kLargestCode;
  }

  __device__ void store(uint32_t (&p)[kColTiles / 4][4]) const {
#pragma unroll
    for (int n = 0; n < kColTiles / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = __byte_perm(codes_[n][i][0], codes_[n][i][1], 0x6420);
    }
  }

 private:
  static constexpr float kSteps = 8.f;  // codes from a power of two to the next
  // float16 has no fractions from 1024 to 2048: what is rounded to it there is whole, and its lower
  // byte is the code.
  static constexpr float kWhole = 1536.f;
  static constexpr uint32_t kWholeBits = 0x6600, kLargestCode = 0x7e;
  // Of the exponents of e4m3, less what makes the probabilities right in the mean.
  static constexpr float kBias = 7.f + (kWhole - 0.46f) / kSteps;

  uint32_t largest_;  // in two halves
  uint32_t codes_[kColTiles / 4][4][2];

  // In the lower bytes of two halves. NaN remains NaN.
  __device__ static uint32_t codes_of(float low, float high) {
    const uint32_t pair = pack(low, high, __half());
    // Below 2^-6 numbers of e4m3 are multiples of 2^-9. There a line of another slope fits best.
    constexpr float kSlope = 0.24f, kSmall = 4.7f;
    const __half2 small = __hfma2(reinterpret_cast<const __half2&>(pair), __float2half2_rn(kSlope),
                                  __float2half2_rn(kWhole - kSlope * kWhole + kSmall));
    return __vimax3_s16x2(pair, reinterpret_cast<const uint32_t&>(small), kWholeBits * 0x10001);
  }
};

}  // namespace flash::sm90
