// Pairs of 16-bit numbers as one register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/cvt.h"

namespace flash {

// `low` and `high` rounded to the type of the last argument. kPositive: what is below zero becomes
// zero, at no cost.
template <bool kPositive = false>
__device__ uint32_t pack(float low, float high, __half type) {
  if (kPositive) return ptx::pack_positive(low, high, type);
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <bool kPositive = false>
__device__ uint32_t pack(float low, float high, __nv_bfloat16 type) {
  if (kPositive) return ptx::pack_positive(low, high, type);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__device__ float2 unpack(uint32_t pair);
template <>
__device__ inline float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

}  // namespace flash
