// Numbers in e4m3 (FP8), of which a cache may be.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace flash {

__device__ inline float descale_of(const Descale& descale, int batch, int head) {
  if (descale.data == nullptr) return 1.f;
  return descale.data[batch * descale.batch_stride + head * descale.head_stride];
}

// What `widen` returns is to be multiplied by this.
constexpr float kE4m3Unit = 256.f;

// The numbers in the upper bytes of both halves as pairs of 16 bits, exactly; they arrive divided
// by kE4m3Unit. No more is needed than to move exponent and mantissa to their places: denormals
// remain what they are. The codes of NaN, 0x7f and 0xff, become +-480.
template <int kShift>
__device__ uint32_t spread(uint32_t x) {
  constexpr uint32_t kMagnitude = 0x7f007f00;
  return (x & 0x80008000) | ((x & kMagnitude) >> kShift);
}
__device__ inline uint32_t widen(uint32_t x, __half) { return spread<1>(x); }
__device__ inline uint32_t widen(uint32_t x, __nv_bfloat16) {
  // The bias of the exponent is 120 larger than that of e4m3, of which 8 are to remain.
  const uint32_t pair = spread<4>(x);
  const __nv_bfloat162 factor = __float2bfloat162_rn(0x1p112f);
  const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), factor);
  return reinterpret_cast<const uint32_t&>(y);
}

// Of four bytes the first and the third.
template <typename T>
__device__ uint32_t widen_even(uint32_t bytes) {
  return widen(bytes << 8, T());
}
// The second and the fourth.
template <typename T>
__device__ uint32_t widen_odd(uint32_t bytes) {
  return widen(bytes, T());
}

}  // namespace flash
