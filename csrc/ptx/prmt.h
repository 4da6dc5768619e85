// Permutations of bytes that __byte_perm does not have.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Four bytes of ones and zeros: byte i of the result has the top bit of the byte of x that nibble i
// of the selector, less 8, numbers.
// PTX ISA, "Data Movement and Conversion Instructions: prmt"
__device__ inline uint32_t spread_signs(uint32_t x, uint32_t selector) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(x), "r"(selector));
  return spread;
}

}  // namespace flash::ptx
