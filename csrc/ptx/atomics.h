// Atomic additions and signals through global memory.
#pragma once

namespace flash::ptx {

// *target += x, in any order with others, without a result.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red"
__device__ inline void red_add(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(target)), "f"(x)
               : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: ld" (.acquire.gpu)
__device__ inline int load_acquire(const int* source) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(source))
               : "memory");
  return x;
}

// *target += x; returns what it was. What this thread has seen happen happens before, and what
// those have seen who added before is seen behind. PTX ISA, "Parallel Synchronization and
// Communication Instructions: atom" (.acq_rel.gpu)
__device__ inline int add_acq_rel(int* target, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(target)), "r"(x)
               : "memory");
  return before;
}

// *target += x; what this thread has seen happen happens before.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red" (.release.gpu)
__device__ inline void red_release_add(int* target, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(target)),
               "r"(x)
               : "memory");
}

}  // namespace flash::ptx
