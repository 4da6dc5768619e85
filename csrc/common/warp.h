// Helpers that tell the compiler what it cannot see, or hide what it should not use.
#pragma once

#include <cstdint>

namespace flash {

// x, which is the same in all lanes; the compiler learns so, and keeps what follows from it in the
// warp's uniform registers.
__device__ inline int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// x, of whose origin the compiler knows nothing: what is computed from it is computed here, and
// does not occupy registers from an earlier place on.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash
