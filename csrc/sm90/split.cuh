// A forward's tile whose keys are divided. Its parts are a cluster of thread blocks, which work on
// nothing else. Each leaves what it has in its shared memory, and merges some rows of all.
#pragma once

#include "common/merge.h"
#include "common/softmax.h"

namespace flash::sm90 {

// What a thread block has of a tile: it takes the place of Q, K and V.
template <int kRows, int kHeadDimV>
struct TilePart {
  // With 8 more columns, lanes that write two of each of 8 rows meet different banks.
  float4 out[kRows][(kHeadDimV + 8) / 4];  // not divided by the sums
  float2 rows[kRows];                      // references and sums

  // By a warp: rows `first_row` and `first_row + 8` of each lane.
  template <int kOutTiles>
  __device__ void leave(SoftmaxState<1>& softmax, const float (&accumulators)[1][kOutTiles][4],
                        int first_row, int lane) {
    WarpTeam().sum(softmax.sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (lane % 4 == 0) rows[row] = make_float2(softmax.reference[half], softmax.sum[half]);
      leave_row(out[row], accumulators[0], half, lane);
    }
  }
};

}  // namespace flash::sm90
