// Hides values from the compiler.
#pragma once

#include <cstdint>

namespace flash::ptx {

// x. The compiler does not know that: what follows from the result is computed where it is used,
// instead of occupying registers from before a loop on.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace flash::ptx
