// Addresses in shared memory.
#pragma once

#include <cstdint>

namespace flash {

// Address within the shared memory window, as instructions on shared memory take it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace flash
