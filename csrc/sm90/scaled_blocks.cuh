// Blocks of keys that share a scale, where operands have 8 bits; and the order of keys in them.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash::sm90 {

// A row of scores is an accumulator: a lane has columns 2 t, 2 t + 1 of each 8. As an operand it
// has columns 4 t .. 4 t + 3 of each 16. So that no probability moves between lanes, place 4 t + j
// of 16 is key 2 t + j (j < 2) or 8 + 2 t + j - 2.
__host__ __device__ constexpr int place_of_key(int key) {
  return (key & ~15) | (key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2);
}

// 128 rows of a head, from `first` on, of which `count` exist.
struct QuantisedRows {
  int batch, head, first, count;
  int block;  // place of their scale and, in units of 128, of their keys
};

// Block `block` of keys. Of packed sequences all blocks are counted on (QuantisedParams).
__device__ inline QuantisedRows keys_of_block(const QuantiseParams& params, int batch, int head,
                                              int block) {
  if (params.cu_seqlens_k == nullptr) {
    const int length = params.seqused_k == nullptr
                           ? params.seqlen_k
                           : min(max(params.seqused_k[batch], 0), params.seqlen_k);
    const int first = block * kScaledKeys;
    return {batch, head, first, min(max(length - first, 0), kScaledKeys), block};
  }
  const auto bound = [&](int i) { return min(max(params.cu_seqlens_k[i], 0), params.total_k); };
  int low = 0, high = params.batch - 1;  // the last sequence that begins at the block or before
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (bound(middle) / kScaledKeys + middle <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int begin = bound(low), end = bound(low + 1);
  const int behind = (block - begin / kScaledKeys - low) * kScaledKeys;
  if (behind < 0 || begin + behind >= end) return {0, head, 0, 0, block};
  return {0, head, begin + behind, min(end - begin - behind, kScaledKeys), block};
}

// Tiles of v, or of k: 128 rows of a head each.
__host__ __device__ inline int64_t tiles_of_keys(const QuantiseParams& params) {
  return int64_t{1} * params.blocks * params.nheads_kv *
         (params.cu_seqlens_k == nullptr ? params.batch : 1);
}
// Of q, which is there for a rotary embedding.
inline int64_t tiles_of_queries(const QuantiseParams& params) {
  const int of_head = (params.seqlen_q + kScaledKeys - 1) / kScaledKeys;
  return int64_t{1} * of_head * params.nheads * params.batch_q;
}

// Heads of the same rows are neighbours: memory has them side by side.
__device__ inline QuantisedRows keys_of_tile(const QuantiseParams& params, int tile) {
  const int block = tile / params.nheads_kv % params.blocks;
  return keys_of_block(params, tile / params.nheads_kv / params.blocks, tile % params.nheads_kv,
                       block);
}

}  // namespace flash::sm90
