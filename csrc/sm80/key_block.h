// Which keys, and which part of the work on them, a thread block of the Ampere-class backward has.
#pragma once

#include "common/block_of_part.h"
#include "common/sequence_tiles.h"
#include "params.h"

namespace flash::sm80 {

// What the host decides about the thread blocks of a launch.
struct KeyBlockOrder {
  int blocks;            // of keys, of a head; of unequal parts, these
  int heads_together;    // heads of K and V that are taken at a time
  int splits;            // parts of each key block
  UnequalParts unequal;  // of dense sequences, if it has any; then splits is 1
};

// The work of a thread block: a part of a key block. `heads_together` heads of K and V are taken at
// a time, their first key blocks first: under a causal mask those are the longest, and none waits
// for one that has not started. Heads are counted through the batch or, if tiles are packed, key
// blocks are.
struct KeyBlock {
  int n_block, batch, head_kv;
  int part, parts;
  int first_part;  // of this key block, among all of the launch

  __device__ KeyBlock(const AttentionParams& params, const SequenceTiles& tiles,
                      const KeyBlockOrder& order, int index) {
    part = index % order.splits;
    parts = order.splits;
    first_part = index - part;
    index /= order.splits;
    const int first_head = index / (order.heads_together * order.blocks) * order.heads_together;
    const int all_heads = tiles.packed() ? params.nheads_kv : params.batch * params.nheads_kv;
    const int heads = min(order.heads_together, all_heads - first_head);
    index -= first_head * order.blocks;
    n_block = index / heads;
    const int head = first_head + index % heads;
    batch = head / params.nheads_kv;
    head_kv = head % params.nheads_kv;
    if (tiles.packed()) {
      const auto [sequence, block] = tiles.find(n_block);
      batch = sequence;
      n_block = block;
    }
    if (order.unequal.blocks > 0) {
      const int of_head = n_block;
      n_block = block_of_part(order.unequal, of_head);
      const int first = order.unequal.first[n_block];
      part = of_head - first;
      parts = order.unequal.first[n_block + 1] - first;
      first_part = head * order.blocks + first;
    }
  }
};

}  // namespace flash::sm80
