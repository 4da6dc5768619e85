// Barriers between some of a thread block's warps. Barrier 0 is __syncthreads'.
#pragma once

namespace flash::ptx {

// Waits until `threads` threads have come to barrier `id` (1 .. 15), in whole warps.
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar"
__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Counts as having come, without waiting.
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar" (.arrive)
__device__ inline void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// bar_sync; returns whether `x` is true in any of them.
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar" (.red.or.pred)
__device__ inline bool bar_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred x, any;\n"
      "setp.ne.s32 x, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, x;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(x))
      : "memory");
  return any != 0;
}

}  // namespace flash::ptx
