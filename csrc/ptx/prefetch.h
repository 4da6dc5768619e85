// Fetches what will be needed.
#pragma once

#include <cuda.h>

namespace flash::ptx {

// map: a parameter of the kernel
// PTX ISA, "Data Movement and Conversion Instructions: prefetch"
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace flash::ptx
