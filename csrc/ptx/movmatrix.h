// Transposition of 8 x 8 matrices of 16-bit elements that a warp holds in registers.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Lane 4 * g + t gives columns 2t, 2t+1 of row g, and receives rows 2t, 2t+1 of column g.
// PTX ISA, "Matrix Transpose Instruction: movmatrix"
__device__ inline uint32_t transpose(uint32_t x) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
  return transposed;
}

}  // namespace flash::ptx
