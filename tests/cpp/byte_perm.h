// Permutations of bytes on the host, as PTX defines them.
#pragma once

#include <cstdint>

// Each nibble of the selector names a byte of x and y; with its top bit, that byte's sign fills the
// result's.
inline uint32_t prmt(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (nibble & 7) * 8 & 0xff);
    if (nibble > 7) byte = byte > 127 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  return prmt(x, y, selector & 0x7777);
}
