// Included before a kernel header: what it takes to compile it for the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

using std::isnan, std::max, std::min, std::signbit;

inline float __fdividef(float x, float y) { return x / y; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<uint32_t>(both << std::min(shift, 32u) >> 32);
}

inline unsigned __umulhi(unsigned x, unsigned y) { return uint64_t{x} * y >> 32; }

// Named by code that does not run here.
float __shfl_xor_sync(unsigned, float, int);
template <typename T>
T __shfl_sync(unsigned, T, int);
bool __any_sync(unsigned, bool);
unsigned __ballot_sync(unsigned, bool);
int __ffs(unsigned);
uint4 make_uint4(uint32_t, uint32_t, uint32_t, uint32_t);
float __log2f(float);
