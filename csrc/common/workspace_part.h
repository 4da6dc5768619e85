// What a thread block leaves of a tile whose keys are divided, in a workspace, for a kernel behind
// that merges the parts of each tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/merge.h"
#include "common/softmax.h"
#include "params.h"

namespace flash {

constexpr int kMergeThreads = 128;  // of the kernel that merges

template <int kRows, int kHeadDimV>
struct WorkspacePart {
  static constexpr int kFours = kHeadDimV / 4;

  float4 (*out)[kFours];  // not divided by the sums
  float2* rows;           // references and sums

  // place: of the part among all
  __device__ WorkspacePart(const ForwardParams& params, int64_t place)
      : out(reinterpret_cast<float4 (*)[kFours]>(params.partial_out) + place * kRows),
        rows(reinterpret_cast<float2*>(params.partial_rows) + place * kRows) {}

  // By a warp that has rows from first_row on, of which there are end_row at most.
  // softmax: with the sums of whole rows
  // has_rows: whether it leaves references and sums
  // col_tile: as in leave_row
  template <int kRowTiles, int kOutTiles, typename ColTile>
  __device__ void leave(const SoftmaxState<kRowTiles>& softmax,
                        const float (&accumulators)[kRowTiles][kOutTiles][4], int first_row,
                        int end_row, bool has_rows, ColTile col_tile, int lane) const {
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = first_row + r * 8 + lane / 4;
      if (row >= end_row) break;
      if (lane % 4 == 0 && has_rows) rows[row] = make_float2(softmax.reference[r], softmax.sum[r]);
      leave_row(out[row], accumulators[r / 2], r % 2, lane, col_tile);
    }
  }

  // Four columns of a row, of this and the parts behind it, each `stride` places from the last.
  // sink: of the row as an exponent of 2, where it has not joined a part; -inf: there is none
  __device__ Merged merged(int parts, int stride, int row, int four, float sink = -INFINITY) const {
    const auto row_of = [&](int part) { return part * stride * kRows + row; };
    const bool has_sink = sink != -INFINITY;  // NaN counts
    return merge<8>(
        parts + has_sink,
        [&](int part) { return part == parts ? make_float2(sink, 1.f) : rows[row_of(part)]; },
        [&](int part) {
          return part == parts ? make_float4(0.f, 0.f, 0.f, 0.f) : out[row_of(part)][four];
        });
  }
};

}  // namespace flash
