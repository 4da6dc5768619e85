// A tile's work divided among thread blocks, for launches with fewer tiles than the GPU has room
// for. Each part leaves what it has in a workspace. Who is last, or a kernel behind, merges all,
// always in the same order: the result does not depend on who that is. Decoding divides the keys, a
// backward the queries.
#pragma once

#include "ptx/atomics.h"

namespace flash {

// Leaves accumulators for who merges. Lanes write side by side.
// x: accumulators of m16n8
template <int kRowTiles, int kColTiles>
__device__ void leave_part(float4* target, const float (&x)[kRowTiles][kColTiles][4], int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      __stcg(target + (m * kColTiles + n) * 32 + lane,
             make_float4(x[m][n][0], x[m][n][1], x[m][n][2], x[m][n][3]));
    }
  }
}

// x += what a part has left.
template <int kRowTiles, int kColTiles>
__device__ void add_part(float (&x)[kRowTiles][kColTiles][4], const float4* part, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      const float4 y = __ldcg(part + (m * kColTiles + n) * 32 + lane);
      x[m][n][0] += y.x, x[m][n][1] += y.y, x[m][n][2] += y.z, x[m][n][3] += y.w;
    }
  }
}

// After leaving: whether this thread block is the last of all. The counter is zero again then.
__device__ inline bool is_last_block(int* counter, int parts) {
  bool is_last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acq_rel(counter, 1) == parts - 1;  // for the whole thread block
    if (is_last) *counter = 0;
  }
  return __syncthreads_or(is_last);
}

}  // namespace flash
