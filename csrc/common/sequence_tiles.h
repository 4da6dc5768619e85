// Tiles of the rows of all sequences, one sequence after the other. Where those of a packed
// sequence begin follows from its first row alone. So it has room for one more than its rows may
// need, and some tiles are empty.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "params.h"

namespace flash {

// The last i < count for which holds(i), which is true of the first some; -1: of none. By a warp,
// in rounds of 32 questions.
template <typename Holds>
__device__ int last_of_first(int count, Holds holds) {
  int last = -1;
  for (int end = count - 1; last < end;) {  // which is between
    const int step = (end - last + 31) / 32, i = last + (threadIdx.x % 32 + 1) * step;
    last += __popc(__ballot_sync(0xffffffff, i <= end && holds(i))) * step;
    end = min(end, last + step - 1);
  }
  return last;
}

struct SequenceTiles {
  const int* bounds;     // cu_seqlens; null: each sequence has as many tiles as the longest may
  int total, batch;      // packed rows; sequences
  Divisor rows, blocks;  // rows of a tile; tiles of the longest sequence

  // longest: rows of a sequence, at most
  SequenceTiles(const int* bounds, int total, int longest, int batch, int rows)
      : bounds(bounds), total(total), batch(batch), rows(rows), blocks((longest - 1) / rows + 1) {}
  static SequenceTiles of_queries(const AttentionParams& params, int rows) {
    return {params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, rows};
  }
  static SequenceTiles of_keys(const AttentionParams& params, int rows) {
    return {params.cu_seqlens_k, params.total_k, params.seqlen_k, params.batch, rows};
  }

  // Also of packed sequences: each has as many as the longest may.
  SequenceTiles equally_many() const {
    SequenceTiles tiles = *this;
    tiles.bounds = nullptr;
    return tiles;
  }
  // That, if it makes fewer.
  SequenceTiles fewest() const {
    return equally_many().count() <= count() ? equally_many() : *this;
  }
  int64_t count() const {
    return packed() ? int64_t{total / rows.value} + batch : int64_t{batch} * blocks.value;
  }
  __host__ __device__ bool packed() const { return bounds != nullptr; }

  // A sequence, and which of its blocks of rows the tile is. It has no such block if that is
  // negative or behind its end.
  struct Place {
    int sequence, block;
  };
  // By a warp.
  __device__ Place find(int tile) const {
    if (!packed()) {
      const int sequence = blocks.quotient(tile);
      return {sequence, tile - sequence * blocks.value};
    }
    const auto first = [&](int i) { return rows.quotient(min(max(bounds[i], 0), total)) + i; };
    const int sequence = max(last_of_first(batch, [&](int i) { return first(i) <= tile; }), 0);
    return {sequence, tile - first(sequence)};
  }
};

}  // namespace flash
