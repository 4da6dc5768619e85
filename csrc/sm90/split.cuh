// A tile's work divided among thread blocks, for launches with fewer tiles than the GPU has room
// for. Each part leaves what it has in a workspace; who is last merges all, always in the same
// order: the result does not depend on who that is. A forward divides the keys, a backward the
// queries.
//
// Warps own their rows, so each merges by itself: the same warp of all parts shares a counter.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/softmax.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// Where the same warp of all parts of a tile leaves what it has. Lanes write side by side.
struct SplitSlot {
  float4* out;   // (parts, kOutTiles, 32): accumulators of m16n8, unnormalized
  float4* rows;  // (parts, 32): the lane's references and sums
  int* counter;  // zero before and after
};

// Leaves accumulators for who merges.
template <int kTiles>
__device__ void leave_part(float4* target, const float (&x)[1][kTiles][4], int lane) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    __stcg(target + i * 32 + lane, make_float4(x[0][i][0], x[0][i][1], x[0][i][2], x[0][i][3]));
  }
}

// After leaving: whether this warp is the last of all parts. The counter is zero again then.
__device__ inline bool is_last_part(int* counter, int parts, int lane) {
  __threadfence();
  __syncwarp();
  int before = 0;
  if (lane == 0) before = atomicAdd(counter, 1);
  before = __shfl_sync(0xffffffff, before, 0);
  if (before != parts - 1) return false;
  if (lane == 0) *counter = 0;
  __threadfence();
  return true;
}

// x += what a part has left.
template <int kTiles>
__device__ void add_part(float (&x)[1][kTiles][4], const float4* part, int lane) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float4 y = __ldcg(part + i * 32 + lane);
    x[0][i][0] += y.x, x[0][i][1] += y.y, x[0][i][2] += y.z, x[0][i][3] += y.w;
  }
}

// Leaves this warp's part. If it is the last, merges all into `out` and `softmax` and returns true.
template <int kOutTiles>
__device__ bool merge_parts(const SplitSlot& slot, int part, int parts, SoftmaxState<1>& softmax,
                            float (&out)[1][kOutTiles][4], int lane) {
  leave_part(slot.out + part * kOutTiles * 32, out, lane);
  __stcg(slot.rows + part * 32 + lane,
         make_float4(softmax.reference[0], softmax.reference[1], softmax.sum[0], softmax.sum[1]));
  if (!is_last_part(slot.counter, parts, lane)) return false;

  softmax = SoftmaxState<1>(softmax.scale_log2, {-INFINITY, -INFINITY}, false);
  for_each(out, [](float& x, int, int, int) { x = 0.f; });
#pragma unroll 1
  for (int i = 0; i < parts; ++i) {
    const float4 rows = __ldcg(slot.rows + i * 32 + lane);
    const float theirs[2] = {ptx::ex2(rows.x - fmaxf(softmax.reference[0], rows.x)),
                             ptx::ex2(rows.y - fmaxf(softmax.reference[1], rows.y))};
    const float ours[2] = {softmax.raise_reference(rows.x > softmax.reference[0], 0, rows.x),
                           softmax.raise_reference(rows.y > softmax.reference[1], 1, rows.y)};
    rescale_output(out, ours);
    softmax.sum[0] += theirs[0] * rows.z;
    softmax.sum[1] += theirs[1] * rows.w;
    const float4* const part_out = slot.out + i * kOutTiles * 32 + lane;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float4 x = __ldcg(part_out + n * 32);
      out[0][n][0] += theirs[0] * x.x;
      out[0][n][1] += theirs[0] * x.y;
      out[0][n][2] += theirs[1] * x.z;
      out[0][n][3] += theirs[1] * x.w;
    }
  }
  return true;
}

}  // namespace flash::sm90
