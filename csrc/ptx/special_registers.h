// Reads of special registers that the compiler does not move: what is computed from them inside a
// loop stays there, instead of occupying registers from before the loop on.
#pragma once

namespace flash::ptx {

// threadIdx.x. PTX ISA, "Special Registers: %tid"
__device__ inline int thread_id() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
  return x;
}

}  // namespace flash::ptx
