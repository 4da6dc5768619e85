// Functions of the special-function unit.
#pragma once

namespace flash::ptx {

// 2^x with a relative error below 2^-22; denormal results are flushed to zero, 2^-inf is 0.
// PTX ISA, "Floating Point Instructions: ex2"
__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x with a relative error below 2^-22; denormal results are flushed to zero.
// PTX ISA, "Floating Point Instructions: rcp.approx.ftz"
__device__ inline float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash::ptx
