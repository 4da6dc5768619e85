// Helpers for code that a whole warp runs together.
#pragma once

namespace flash {

// x, which is the same in all lanes; the compiler learns so, and keeps what follows from it in the
// warp's uniform registers.
__device__ inline int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
// The same for a condition. A vote does not wait behind the warp's memory accesses, as a shuffle
// does.
__device__ inline bool warp_uniform_condition(bool x) { return __any_sync(0xffffffff, x); }

// x of each lane, kept in a register. Where the compiler finds few, it would compute x again in
// each step of a loop, and read the thread's number for that (S2R), for which what is behind waits.
template <typename T>
__device__ inline T keep(T x) {
  return __shfl_sync(0xffffffff, x, threadIdx.x % 32);
}

}  // namespace flash
