// Rows of packed queries that belong to no sequence: before the first, behind the last, and those
// of a sequence beyond the longest length. Their output is 0, their log-sum-exp -inf.
#pragma once

#include <cmath>

#include "common/sequence.h"
#include "params.h"

namespace flash {

struct RowGap {
  int begin, end;
};

// Behind sequence `batch`; -1: before the first.
__device__ inline RowGap gap_behind(const AttentionParams& params, int batch) {
  RowGap gap{0, params.total_q};
  if (batch + 1 < params.batch) gap.end = min(params.cu_seqlens_q[batch + 1], params.total_q);
  if (batch < 0) return gap;
  const Sequence sequence(params, batch);
  gap.begin = sequence.q_first + sequence.seqlen_q;
  return gap;
}

// By `workers` warps that share the rows. T: of the output
template <typename T>
__device__ void clear_gap(const ForwardParams& params, RowGap gap, int worker, int workers,
                          int lane) {
  for (int row = gap.begin + worker; row < gap.end; row += workers) {
    for (int head = 0; head < params.nheads; ++head) {
      if (lane == 0) params.lse[head * params.lse_head_stride + row] = -INFINITY;
      T* const out = rows_of<T>(params.out, 0, row, head);
      for (int col = lane; col < params.headdim_v; col += 32) out[col] = static_cast<T>(0.f);
    }
  }
}

// The same for all gaps.
template <typename T>
__device__ void clear_gaps(const ForwardParams& params, int worker, int workers, int lane) {
  for (int first = -1; first < params.batch; first += 32) {
    const int batch = first + lane;
    const RowGap gap = batch < params.batch ? gap_behind(params, batch) : RowGap{0, 0};
    for (unsigned open = __ballot_sync(0xffffffff, gap.begin < gap.end); open != 0;
         open &= open - 1) {
      const int source = __ffs(open) - 1;
      const RowGap found{__shfl_sync(0xffffffff, gap.begin, source),
                         __shfl_sync(0xffffffff, gap.end, source)};
      clear_gap<T>(params, found, worker, workers, lane);
    }
  }
}

}  // namespace flash
