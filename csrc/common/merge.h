// Merging what several have of the same rows, each relative to references of its own. They leave it
// in memory that all can read, row by row; then each thread merges four columns of a row.
#pragma once

#include <cfloat>

#include "common/pack.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/special_functions.h"

namespace flash {

// Leaves what a lane has of row `half` (0: the upper) of accumulators of m16n8. Those of place n
// are 8 columns from 8 * col_tile(n) on.
template <int kOutTiles, typename ColTile>
__device__ void leave_row(float4* row, const float (&out)[kOutTiles][4], int half, int lane,
                          ColTile col_tile) {
  auto* const target = reinterpret_cast<float2*>(row) + lane % 4;
#pragma unroll
  for (int n = 0; n < kOutTiles; ++n) {
    target[col_tile(n) * 4] = make_float2(out[n][2 * half], out[n][2 * half + 1]);
  }
}
template <int kOutTiles>
__device__ void leave_row(float4* row, const float (&out)[kOutTiles][4], int half, int lane) {
  leave_row(row, out, half, lane, [](int n) { return n; });
}

// What some parts have in sum of four columns of a row: the output relative to `reference`, and the
// sum of the row.
struct Merged {
  float4 out;
  float reference, sum;
};

// Merges parts in their order. row_of(part) returns its reference and sum, out_of(part) its output;
// kAtOnce are read at a time.
template <int kAtOnce, typename RowOf, typename OutOf>
__device__ Merged merge(int parts, RowOf row_of, OutOf out_of) {
  Merged all{make_float4(0.f, 0.f, 0.f, 0.f), -FLT_MAX, 0.f};
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    float2 rows[kAtOnce];
    float4 outs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_part = first + i < parts;
      rows[i] = is_part ? row_of(first + i) : make_float2(-FLT_MAX, 0.f);
      outs[i] = is_part ? out_of(first + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float reference = all.reference;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) reference = fmaxf(reference, rows[i].x);
    const float before = ptx::ex2(all.reference - reference);
    float4& x = all.out;
    x.x *= before, x.y *= before, x.z *= before, x.w *= before;
    all.sum *= before;
    all.reference = reference;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float factor = ptx::ex2(rows[i].x - reference);
      const float4& y = outs[i];
      x.x += factor * y.x, x.y += factor * y.y, x.z += factor * y.z, x.w += factor * y.w;
      all.sum += factor * rows[i].y;
    }
  }
  return all;
}

// Writes four columns of a row; with the first of them its log-sum-exp. Where kAnyAlignment,
// params.aligned says whether the four can be written at once.
// scale: what the output is to be multiplied by
template <typename Out, bool kAnyAlignment = false>
__device__ void store_merged(const ForwardParams& params, const Sequence& sequence, int query,
                             int head, int col, const Merged& x, float scale) {
  const int place = sequence.q_first + query;
  const RowEnd end = end_of_row(x.reference, x.sum, scale);
  if (col == 0) {
    params.lse[sequence.q_batch * params.lse_batch_stride + head * params.lse_head_stride + place] =
        end.lse;
  }
  if (col >= params.headdim_v) return;
  Out* const target = rows_of<Out>(params.out, sequence.q_batch, place, head) + col;
  const uint2 values = make_uint2(pack(x.out.x * end.factor, x.out.y * end.factor, Out()),
                                  pack(x.out.z * end.factor, x.out.w * end.factor, Out()));
  if (!kAnyAlignment || params.aligned) {
    *reinterpret_cast<uint2*>(target) = values;
  } else {
    for (int i = 0; i < min(4, params.headdim_v - col); ++i) {
      target[i] = reinterpret_cast<const Out*>(&values)[i];
    }
  }
}

}  // namespace flash
