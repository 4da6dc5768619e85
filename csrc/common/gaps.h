// Rows that belong to no sequence. Of packed tensors: before the first sequence, behind the last,
// and those of a sequence beyond the longest length; of keys also those before leftpad_k and from
// seqused_k on. Results are 0 there, the log-sum-exp is -inf. If cu_seqlens decrease, tiles may be
// missing (sequence_tiles.h): then all rows count, so that none is left as it was in memory.
#pragma once

#include <cmath>

#include "common/range.h"
#include "common/sequence.h"
#include "params.h"

namespace flash {

// Packed queries behind sequence `batch`; -1: before the first.
__device__ inline Range query_gap(const AttentionParams& params, int batch) {
  Range gap{0, params.total_q};
  if (batch >= 0 && params.cu_seqlens_q[batch + 1] < params.cu_seqlens_q[batch]) return gap;
  if (batch + 1 < params.batch) gap.end = min(params.cu_seqlens_q[batch + 1], params.total_q);
  if (batch < 0) return gap;
  const Sequence sequence(params, batch);
  gap.begin = sequence.q_first + sequence.seqlen_q;
  return gap;
}

// Keys of the batch entry of sequence index / 2: before the sequence if index is even, else behind
// it. Of packed keys, those between two sequences are before the later one.
__device__ inline Range key_gap(const AttentionParams& params, int index) {
  const int batch = index / 2;
  const bool packed = params.cu_seqlens_k != nullptr;
  if (packed && params.cu_seqlens_k[batch + 1] < params.cu_seqlens_k[batch]) {
    return {0, params.total_k};
  }
  const Sequence sequence(params, batch);
  const int end = sequence.k_first + sequence.seqlen_k;
  if (index % 2 == 1) {
    if (!packed) return {end, params.seqlen_k};
    return {end, batch + 1 == params.batch ? params.total_k : end};
  }
  if (!packed || batch == 0) return {0, sequence.k_first};
  const Sequence last(params, batch - 1);
  return {last.k_first + last.seqlen_k, sequence.k_first};
}

// Calls clear(index, row) for the rows of gap_of(index), begin <= index < end, by a warp. `workers`
// warps share the rows.
template <typename GapOf, typename Clear>
__device__ void for_each_gap_row(int begin, int end, GapOf gap_of, int worker, int workers,
                                 int lane, Clear clear) {
  for (int first = begin; first < end; first += 32) {
    const int index = first + lane;
    const Range gap = index < end ? gap_of(index) : Range{0, 0};
    for (unsigned open = __ballot_sync(0xffffffff, !gap.empty()); open != 0; open &= open - 1) {
      const int source = __ffs(open) - 1;
      const Range found{__shfl_sync(0xffffffff, gap.begin, source),
                        __shfl_sync(0xffffffff, gap.end, source)};
      for (int row = found.begin + worker; row < found.end; row += workers) {
        clear(first + source, row);
      }
    }
  }
}

// Zeros in a row of `cols` elements, by a warp. aligned: it can be moved 16 bytes at a time
template <typename T>
__device__ void clear_row(T* row, int cols, bool aligned, int lane) {
  if (aligned) {
    for (int col = lane * 8; col < cols; col += 32 * 8) {
      *reinterpret_cast<uint4*>(row + col) = make_uint4(0, 0, 0, 0);
    }
  } else {
    for (int col = lane; col < cols; col += 32) row[col] = static_cast<T>(0.f);
  }
}

// In the results of a forward with packed queries. T: of the output
template <typename T>
__device__ void clear_gaps(const ForwardParams& params, int worker, int workers, int lane) {
  const auto gap_of = [&](int batch) { return query_gap(params, batch); };
  for_each_gap_row(-1, params.batch, gap_of, worker, workers, lane, [&](int, int row) {
    for (int head = 0; head < params.nheads; ++head) {
      if (lane == 0) params.lse[head * params.lse_head_stride + row] = -INFINITY;
      clear_row(rows_of<T>(params.out, 0, row, head), params.headdim_v, false, lane);
    }
  });
}

// In the results of a backward. T: of the gradients
template <typename T>
__device__ void clear_gaps(const BackwardParams& params, int worker, int workers, int lane) {
  if (params.cu_seqlens_q != nullptr) {
    const auto gap_of = [&](int batch) { return query_gap(params, batch); };
    for_each_gap_row(-1, params.batch, gap_of, worker, workers, lane, [&](int, int row) {
      for (int head = 0; head < params.nheads; ++head) {
        if (lane == 0) params.delta[head * params.lse_head_stride + row] = 0.f;
        clear_row(rows_of<T>(params.dq, 0, row, head), params.headdim, params.aligned, lane);
      }
    });
  }
  const auto gap_of = [&](int index) { return key_gap(params, index); };
  for_each_gap_row(0, 2 * params.batch, gap_of, worker, workers, lane, [&](int index, int row) {
    const int slot = params.cu_seqlens_k == nullptr ? index / 2 : 0;
    for (int head = 0; head < params.nheads_kv; ++head) {
      clear_row(rows_of<T>(params.dk, slot, row, head), params.headdim, params.aligned, lane);
      clear_row(rows_of<T>(params.dv, slot, row, head), params.headdim_v, params.aligned, lane);
    }
  });
}

}  // namespace flash
