// Loads of 8 x 8 matrices of 16-bit elements from shared memory into mma fragments.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Matrix i's row r starts at the address given by lane 8 * i + r. Lane 4 * g + t receives columns
// 2t, 2t+1 of row g of matrix i in d[i].
// PTX ISA, "Warp-level matrix load instruction: ldmatrix"
__device__ inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address)
               : "memory");
}

// The same with each matrix transposed: d[i] holds rows 2t, 2t+1 of column g.
// PTX ISA, "Warp-level matrix load instruction: ldmatrix" (.trans)
__device__ inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address)
               : "memory");
}

}  // namespace flash::ptx
