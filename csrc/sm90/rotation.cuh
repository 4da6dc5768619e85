// The random rotation of q and k before they are quantised: x -> (x * sign) H / sqrt(kDim). It
// spreads outliers over all columns and leaves their products as they are. H is a Hadamard matrix:
// Sylvester's, or for 96 and 192 the Kronecker product of Paley's of order 12 and Sylvester's.
// flash_attn/_backends/quantisation.py has the same.
#pragma once

#include <cstdint>

namespace flash::sm90 {

// Bits of the fraction of pi, that of column i in bit i % 32 of word i / 32: 1 is the sign -1.
__host__ __device__ constexpr uint32_t sign_bits(int word) {
  constexpr uint32_t kWords[] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                 0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};
  return kWords[word];
}

// Whether Paley's matrix of order 12 has -1 at (row, col): from the squares modulo 11.
__host__ __device__ constexpr bool paley_is_negative(int row, int col) {
  constexpr unsigned kSquares = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 9;
  if (row == 0) return false;
  if (col == 0) return true;
  return !(kSquares >> ((row - col + 11) % 11) & 1);
}

// The rows in which it has -1 in a column, as bits.
__host__ __device__ constexpr uint32_t paley_negative_rows(int col) {
  uint32_t rows = 0;
  for (int row = 0; row < 12; ++row) rows |= uint32_t{paley_is_negative(row, col)} << row;
  return rows;
}

// Four neighbouring lanes share a row: lane t = lane % 4 has columns 32 i + 8 t + e, as x[i][e].
template <int kDim>
struct Rotation4 {
  static constexpr int kParts = kDim / 32;
  static constexpr bool kPaley = kDim % 12 == 0;
  // Of the columns the lowest log2(kSylvester) bits are Sylvester's.
  static constexpr int kSylvester = kPaley ? kDim / 12 : kDim;
  static_assert(!kPaley || kSylvester == 8 || kSylvester == 16);

  // The sum and the difference with what lane t ^ distance has.
  __device__ static void butterfly_of_lanes(float (&x)[kParts][8], int t, int distance) {
    const float sign = t & distance ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[i][e] = fmaf(sign, x[i][e], __shfl_xor_sync(0xffffffff, x[i][e], distance));
      }
    }
  }

  __device__ static void apply(float (&x)[kParts][8], int t) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint32_t signs = sign_bits(i) >> 8 * t;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = signs >> e & 1 ? -x[i][e] : x[i][e];
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e & step) continue;
          const float low = x[i][e], high = x[i][e | step];
          x[i][e] = low + high, x[i][e | step] = low - high;
        }
      }
    }
    if constexpr (kSylvester >= 16) butterfly_of_lanes(x, t, 1);
    if constexpr (kSylvester >= 32) butterfly_of_lanes(x, t, 2);
    if constexpr (kPaley) {
      multiply_by_paley(x, t);
    } else {
#pragma unroll
      for (int step = 1; step < kParts; step *= 2) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          if (i & step) continue;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float low = x[i][e], high = x[i | step][e];
            x[i][e] = low + high, x[i | step][e] = low - high;
          }
        }
      }
    }
  }

 private:
  // Of the twelve columns of Paley's matrix: those of part i are kTwelfths * i and on, one for each
  // kLanes lanes.
  static constexpr int kLanes = kSylvester / 8, kTwelfths = 4 / (kPaley ? kLanes : 1);

  // Rows in which Paley's matrix has -1 in the column of part `to` of lane t: a bit for each.
  __device__ static uint32_t negative_rows(int to, int t) {
    uint32_t rows = 0;
#pragma unroll
    for (int i = 0; i < kTwelfths; ++i) {
      const uint32_t of_column = paley_negative_rows(kTwelfths * to + i);
      rows = t / kLanes == i ? of_column : rows;
    }
    return rows;
  }

  __device__ static void multiply_by_paley(float (&x)[kParts][8], int t) {
    constexpr int kSome = 4;  // columns at a time: registers are few
#pragma unroll
    for (int first = 0; first < 8; first += kSome) {
      float sums[kParts][kSome] = {};
#pragma unroll
      for (int distance = 0; distance < 4; distance += kLanes) {
        uint32_t negative[kParts];  // bit kTwelfths * i: for part i of the other lane
#pragma unroll
        for (int to = 0; to < kParts; ++to) {
          negative[to] = negative_rows(to, t) >> (t ^ distance) / kLanes;
        }
#pragma unroll
        for (int from = 0; from < kParts; ++from) {
          float theirs[kSome];
#pragma unroll
          for (int e = 0; e < kSome; ++e) {
            theirs[e] = __shfl_xor_sync(0xffffffff, x[from][first + e], distance);
          }
#pragma unroll
          for (int to = 0; to < kParts; ++to) {
            const float sign = negative[to] >> kTwelfths * from & 1 ? -1.f : 1.f;
#pragma unroll
            for (int e = 0; e < kSome; ++e) sums[to][e] = fmaf(sign, theirs[e], sums[to][e]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int e = 0; e < kSome; ++e) x[i][first + e] = sums[i][e];
      }
    }
  }
};

}  // namespace flash::sm90
