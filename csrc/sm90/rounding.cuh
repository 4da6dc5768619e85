// Rows of a rotated matrix become numbers of 8 bits, with a scale.
#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ptx/cvt.h"
#include "ptx/max_nan.h"
#include "sm90/rotation.cuh"

namespace flash::sm90 {

// NaN if there is any, as of all that follow.
__device__ inline float largest_of_lanes(float x, int lanes) {
  for (int i = 1; i < lanes; i *= 2) x = ptx::max_nan(x, __shfl_xor_sync(0xffffffff, x, i));
  return x;
}

// What the largest number of T stands for `largest` with.
template <typename T>
__device__ float step_of(float largest) {
  constexpr float kMost = std::is_same_v<T, int8_t> ? 127.f : 448.f;
  return largest < 0x1p-100f ? 1.f : __fdiv_rn(largest, kMost);  // 1 over the step is finite
}

// Four numbers, rounded to nearest, ties to even. Of int8 they are within +-127.
__device__ inline uint32_t pack_four(float a, float b, float c, float d, __nv_fp8_e4m3) {
  return ptx::pack_e4m3(a, b, c, d);
}
__device__ inline uint32_t pack_four(float a, float b, float c, float d, int8_t) {
  const auto whole = [](float x) { return __float_as_uint(x + 12582912.f); };  // in the lowest byte
  return __byte_perm(__byte_perm(whole(a), whole(b), 0x0040),
                     __byte_perm(whole(c), whole(d), 0x0040), 0x5410);
}

// Of a lane's numbers of row g (half 0) or g + 8, before their norm.
template <int kParts>
__device__ float largest_of_row(const float (&x)[kParts][4][4], int half) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) {
    const float (&pairs)[4] = x[i / 4][i % 4];
    largest = ptx::max_nan(largest, fabsf(pairs[2 * half]));
    largest = ptx::max_nan(largest, fabsf(pairs[2 * half + 1]));
  }
  return largest;
}

// Rounds them to T. write(i, numbers): those of columns 32 i + 8 t .. 32 i + 8 t + 7
template <typename T, int kParts, typename Write>
__device__ void round_row(const float (&x)[kParts][4][4], int half, float factor, Write write) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const auto pack_pairs = [&](int m) {
      const float (&low)[4] = x[i][2 * m], (&high)[4] = x[i][2 * m + 1];
      return pack_four(low[2 * half] * factor, low[2 * half + 1] * factor, high[2 * half] * factor,
                       high[2 * half + 1] * factor, T());
    };
    write(i, make_uint2(pack_pairs(0), pack_pairs(1)));
  }
}

}  // namespace flash::sm90
