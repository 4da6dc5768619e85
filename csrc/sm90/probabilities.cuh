// From scores of operands in 8 bits to probabilities, as an operand of the second product.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "common/pack.h"
#include "common/softmax.h"
#include "ptx/cvt.h"
#include "ptx/opaque.h"
#include "ptx/special_functions.h"
#include "ptx/wgmma.h"
#include "sm90/softmax.cuh"

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

// Calls encode(n, i, r, x) for each register of P, an A operand: x are what the accumulators have
// for p[n][i], four of row r. Pairs of two neighbouring accumulators are a register, if the values
// are in the order of scaled_blocks.cuh.
template <int kColTiles, typename Encode>
__device__ void for_each_four(const float (&accumulators)[1][kColTiles][4], Encode encode) {
#pragma unroll
  for (int n = 0; n < kColTiles / 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2, tile = 4 * n + i / 2 * 2;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = accumulators[0][tile + j / 2][2 * r + j % 2];
      encode(n, i, r, x);
    }
  }
}

constexpr float kLargestE4m3 = 448.f;

// P = exp(S) relative to the rows' references, times 2^kBits, in three ways. All say whether a row
// has outgrown its reference. P V of the block before may still read P: finish_output(), which
// waits for its end, is called before P is written.
// kAhead: registers of P that are computed before finish_output(); 0: it has been called

// Rounded to the 16 bits of T, as softmax.cuh has them.
template <typename T, int kColTiles, int kAhead_>
struct WideProbabilities {
  static constexpr int kBits = 0, kAhead = kAhead_;
  static constexpr bool kSummed = true;
  float sums[2];

  __device__ static Exponents relative(const Exponents& exponents, const SoftmaxState<1>& softmax) {
    return exponents.relative_to(softmax, 1.f, 0.f);
  }

  template <typename FinishOutput>
  __device__ WideProbabilities(const float (&scores)[1][kColTiles][4], const Exponents& relative,
                               FinishOutput finish_output)
      : sums{} {
    add_powers(scores, relative, [](int place) { return place < kAhead; });
    finish_output();
    add_powers(scores, relative, [](int place) { return place >= kAhead; });
  }

  // (NaN too.)
  __device__ bool outgrown() const { return !(sums[0] <= kLargestSum && sums[1] <= kLargestSum); }

  // (A mere copy of what was computed ahead would be left out, and p written before
  // finish_output().)
  __device__ void store(uint32_t (&p)[kColTiles / 2][4]) const {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const uint32_t one = ptx::opaque(std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u);
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * n + i < kAhead) {
          reinterpret_cast<Pair&>(p[n][i]) =
              __hmul2(reinterpret_cast<const Pair&>(p_[n][i]), reinterpret_cast<const Pair&>(one));
        } else {
          p[n][i] = p_[n][i];
        }
      }
    }
  }

 private:
  uint32_t p_[kColTiles / 2][4];

  // Of the registers that are `wanted`.
  template <typename Wanted>
  __device__ void add_powers(const float (&scores)[1][kColTiles][4], const Exponents& relative,
                             Wanted wanted) {
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!wanted(4 * n + i)) continue;
        const int r = i % 2;
        const float* const pair = &scores[0][2 * n + i / 2][2 * r];
        const float low = ptx::ex2(relative.of(pair[0], r)),
                    high = ptx::ex2(relative.of(pair[1], r));
        sums[r] += low;
        sums[r] += high;
        p_[n][i] = pack(low, high, T());
      }
    }
  }
};

// Rounded to the nearest e4m3, later than the powers are computed. The rows sum the powers before
// they are rounded.
template <int kColTiles, int kBits_, int kAhead_>
struct RoundedProbabilities {
  static constexpr int kBits = kBits_, kAhead = kAhead_;
  static constexpr bool kSummed = true;  // or products with ones do it
  float sums[2];                         // of this lane's, times 2^kBits

  __device__ static Exponents relative(const Exponents& exponents, const SoftmaxState<1>& softmax) {
    return exponents.relative_to(softmax, 1.f, kBits);
  }

  template <typename FinishOutput>
  __device__ RoundedProbabilities(const float (&scores)[1][kColTiles][4], const Exponents& relative,
                                  FinishOutput finish_output)
      : sums{}, largest_(0.f) {
    float ahead[kAhead + 1][4];  // (no array is empty)
    for_each_four(scores, [&](int n, int i, int r, const float (&s)[4]) {
      if (4 * n + i < kAhead) add_powers(ahead[4 * n + i], s, r, relative);
    });
    if constexpr (kAhead > 0) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (float& y : ahead[i]) ptx::hold(y);
      }
    }
    finish_output();
    for_each_four(scores, [&](int n, int i, int r, const float (&s)[4]) {
      float y[4];
      if (4 * n + i < kAhead) {
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = ahead[min(4 * n + i, kAhead)][j];
      } else {
        add_powers(y, s, r, relative);
      }
      p_[n][i] = ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
    });
  }

  __device__ bool outgrown() const { return largest_ > kLargestE4m3; }

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

  __device__ void add_powers(float (&y)[4], const float (&s)[4], int r, const Exponents& relative) {
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = ptx::ex2(relative.of(s[j], r));
    const float sum = (y[0] + y[1]) + (y[2] + y[3]);
    sums[r] += sum;
    largest_ = fmaxf(largest_, sum);
  }
};

// Without the special-function unit: the code of a number of e4m3 is a multiple of its logarithm,
// but for the mantissa, which is linear between powers of two. So the exponent, times 8 and
// rounded, is taken for the code. Its error is 3.1 % where rounding to e4m3 has 2.6.
template <int kColTiles, int kAhead_>
struct LinearProbabilities {
  static constexpr int kBits = 6, kAhead = kAhead_;
  static constexpr bool kSummed = false;

  __device__ static Exponents relative(const Exponents& exponents, const SoftmaxState<1>& softmax) {
    return exponents.relative_to(softmax, kSteps, kBits + kBias);
  }

  template <typename FinishOutput>
  __device__ LinearProbabilities(const float (&scores)[1][kColTiles][4], const Exponents& relative,
                                 FinishOutput finish_output)
      : largest_(0) {
    for_each_four(scores, [&](int n, int i, int r, const float (&s)[4]) {
      if (4 * n + i < kAhead) encode(n, i, r, s, relative);
    });
    finish_output();
    for_each_four(scores, [&](int n, int i, int r, const float (&s)[4]) {
      if (4 * n + i >= kAhead) encode(n, i, r, s, relative);
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

  __device__ void encode(int n, int i, int r, const float (&s)[4], const Exponents& relative) {
    const uint32_t low = codes_of(relative.of(s[0], r), relative.of(s[1], r));
    const uint32_t high = codes_of(relative.of(s[2], r), relative.of(s[3], r));
    largest_ = __vimax3_u16x2(largest_, low, high);
    codes_[n][i][0] = low;
    codes_[n][i][1] = high;
  }

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
