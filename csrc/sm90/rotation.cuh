// The random rotation of q and k before they are quantised: x -> (x * sign) H / sqrt(kDim). It
// spreads outliers over all columns and leaves their products as they are. H is a Hadamard matrix:
// Sylvester's, or for 96 and 192 the Kronecker product of Williamson's of order 12 and Sylvester's.
// flash_attn/_backends/quantisation.py has the same.
//
// Tensor cores multiply by what mixes columns of different lanes, exactly: x has 16 bits, the
// factors are 1 and -1. The rest are additions of what a lane has.
#pragma once

#include <cstdint>

#include "common/pack.h"
#include "ptx/mma_sync.h"

namespace flash::sm90 {

// Bits of the fraction of pi, that of column i in bit i % 32 of word i / 32: 1 is the sign -1.
__host__ __device__ constexpr uint32_t sign_bits(int word) {
  constexpr uint32_t kWords[] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                 0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};
  return kWords[word];
}

// Of a warp, for its lane 4 g + t. A column is 32 i + 8 t + 4 m + 2 r + p, with m, r and p of one
// bit: before, a lane has those of its t for rows g and g + 8, and afterwards too.
template <typename T, int kDim>
class RandomRotation {
 public:
  static constexpr int kParts = kDim / 32;
  // [i][2 m + r]: columns p = 0 and 1 of row g, then of row g + 8.
  using Rows = float[kParts][4][4];

  // x = rows * sqrt(kDim) afterwards. read(i, half): a lane's eight columns of row g or g + 8
  template <typename Read>
  __device__ static void apply(Rows& x, int lane, Read read) {
    const int g = lane / 4, t = lane % 4;
    const bool minus = __popc(t & g / 2) & 1;  // the result's t is g / 2 here, and its p is g % 2
    const uint32_t signs = pack(minus ? -1.f : 1.f, minus != (g % 2 == 1) ? -1.f : 1.f, T());
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint4 upper = read(i, 0), lower = read(i, 1);
      const uint32_t bits = sign_bits(i) >> 8 * t;
      const auto sign = [=](int pair) {
        return (bits >> 2 * pair & 1) << 15 | (bits >> 2 * pair & 2) << 30;
      };
      const uint32_t a[2][4] = {
          {upper.x ^ sign(0), lower.x ^ sign(0), upper.y ^ sign(1), lower.y ^ sign(1)},
          {upper.z ^ sign(2), lower.z ^ sign(2), upper.w ^ sign(3), lower.w ^ sign(3)}};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float (&sums)[4] = x[i][pair];
        sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (!kMixesM && m != pair / 2) continue;
          ptx::mma_m16n8k16(sums, a[m], factors(signs, m, 0, pair), factors(signs, m, 1, pair),
                            T());
        }
      }
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if constexpr (kDim == 96) {
        multiply_by_williamson([&](int group, int e) -> float& { return x[e][group][p]; });
      } else if constexpr (kDim == 192) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          multiply_by_williamson([&](int group, int e) -> float& {
            return x[group / 2 * 3 + e][group % 2 * 2 + r][p];
          });
        }
      } else {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) multiply_by_sylvester(x, pair, p);
      }
    }
  }

 private:
  // Whether those bits of a column are Sylvester's.
  static constexpr bool kMixesM = kDim != 96 && kDim != 192, kMixesR = kDim != 96;

  // B operand of columns (m, r) before, `pair` afterwards. signs: of t, g and p
  __device__ static uint32_t factors(uint32_t signs, int m, int r, int pair) {
    const int new_m = pair / 2, new_r = pair % 2;
    if (!kMixesR && r != new_r) return 0;
    const bool minus = (kMixesM && m & new_m) != (kMixesR && r & new_r);
    return minus ? signs ^ 0x80008000 : signs;
  }

  __device__ static void multiply_by_sylvester(Rows& x, int pair, int p) {
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (i & step) continue;
        const float low = x[i][pair][p], high = x[i | step][pair][p];
        x[i][pair][p] = low + high, x[i | step][pair][p] = low - high;
      }
    }
  }

  // at(group, e): of 4 groups of 3. Blocks of the matrix are J on the diagonal, the matrix of ones,
  // and J - 2 or its negative elsewhere.
  template <typename At>
  __device__ static void multiply_by_williamson(At at) {
    constexpr uint32_t kNegative[4] = {0b0000, 0b0101, 0b1001, 0b0011};  // bit: the other column
    float sums[4], rest[4][3];
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      sums[group] = at(group, 0) + at(group, 1) + at(group, 2);
#pragma unroll
      for (int e = 0; e < 3; ++e) rest[group][e] = fmaf(-2.f, at(group, e), sums[group]);
    }
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        float sum = sums[group];
#pragma unroll
        for (int from = 0; from < 4; ++from) {
          if (from == group) continue;
          sum += kNegative[from] >> group & 1 ? -rest[from][e] : rest[from][e];
        }
        at(group, e) = sum;
      }
    }
  }
};

}  // namespace flash::sm90
