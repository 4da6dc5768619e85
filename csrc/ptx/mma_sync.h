// Matrix multiply-accumulate by one warp: mma.sync (Ampere and newer).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash::ptx {

// The fragments of m16n8k16, for lane 4 * g + t (g in 0..7, t in 0..3):
//   a[0..3]: rows {g, g+8, g, g+8}, columns 2t, 2t+1 (a[0], a[1]) and 2t+8, 2t+9 (a[2], a[3])
//   b0, b1:  k = 2t, 2t+1 and 2t+8, 2t+9 of column g
//   c[0..3]: row g, columns 2t, 2t+1; row g+8, columns 2t, 2t+1

// PTX ISA, "Multiply-and-Accumulate Instruction: mma" (.m16n8k16, f32 += f16 * f16)
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PTX ISA, "Multiply-and-Accumulate Instruction: mma" (.m16n8k16, f32 += bf16 * bf16)
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flash::ptx
