// The parts of a forward's tile (common/parts.h), which divide its keys. Warps own their rows, so
// each merges by itself: the same warp of all parts shares a counter.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/parts.h"
#include "common/softmax.h"
#include "ptx/special_functions.h"

namespace flash::sm90 {

// Where the same warp of all parts of a tile leaves what it has. Lanes write side by side.
struct SplitSlot {
  float4* out;   // (parts, kOutTiles, 32): accumulators of m16n8, unnormalized
  float4* rows;  // (parts, 32): the lane's references and sums
  int* counter;  // zero before and after
};

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
