// Fetches what will be needed.
#pragma once

#include <cuda.h>

namespace flash::ptx {

// map: a parameter of the kernel
// PTX ISA, "Data Movement and Conversion Instructions: prefetch"
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Fetches a box of a tensor of five dimensions to the L2 cache, by one lane.
// map: a parameter of the kernel
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.prefetch.tensor"
__device__ inline void prefetch_box(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                    int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];\n" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace flash::ptx
