// Stores of 8 x 8 matrices of 16-bit elements from mma fragments to shared memory (Hopper).
#pragma once

#include <cstdint>

namespace flash::ptx {

// Lane 4 * g + t holds columns 2t, 2t+1 of row g of matrix i in x[i]. Column c of matrix i goes to
// the 16 bytes at the address given by lane 8 * i + c.
// PTX ISA, "Warp-level matrix store instruction: stmatrix" (.trans)
__device__ inline void stmatrix_x4_trans(uint32_t shared_address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   shared_address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The same, not transposed: row r of matrix i goes to the 16 bytes at the address given by lane
// 8 * i + r.
__device__ inline void stmatrix_x4(uint32_t shared_address, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

}  // namespace flash::ptx
