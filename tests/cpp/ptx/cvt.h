// In place of csrc/ptx/cvt.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

namespace flash::ptx {

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed = 0;
  const float numbers[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) packed |= uint32_t{__nv_fp8_e4m3(numbers[i]).__x} << 8 * i;
  return packed;
}

template <typename T>
uint32_t pack_positive(float low, float high, T) {
  const T pair[2] = {T(low < 0.f ? 0.f : low), T(high < 0.f ? 0.f : high)};
  uint32_t packed;
  std::memcpy(&packed, pair, sizeof(packed));
  return packed;
}

}  // namespace flash::ptx
