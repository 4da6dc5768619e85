// Conversions to 16 bits, and to 8 bits (Ada, Hopper).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash::ptx {

// Four numbers rounded to the nearest e4m3, at most +-448, the first in the lowest byte. NaN stays
// NaN.
// PTX ISA, "Data Movement and Conversion Instructions: cvt"
__device__ inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Two numbers rounded to the type of the last argument, `low` in the lower half; those below zero
// become zero. NaN stays NaN.
// PTX ISA, "Data Movement and Conversion Instructions: cvt"
__device__ inline uint32_t pack_positive(float low, float high, __half) {
  uint32_t packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
  return packed;
}
__device__ inline uint32_t pack_positive(float low, float high, __nv_bfloat16) {
  uint32_t packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
  return packed;
}

}  // namespace flash::ptx
