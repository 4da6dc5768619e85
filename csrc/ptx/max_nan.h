// The larger of two numbers, where NaN counts (Ampere and newer).
#pragma once

namespace flash::ptx {

// NaN if one of them is.
// PTX ISA, "Floating Point Instructions: max"
__device__ inline float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

}  // namespace flash::ptx
