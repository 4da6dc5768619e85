// In which order the thread blocks of an Ampere-class backward take blocks of keys, and into how
// many parts the work on each of them is divided. Host code.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/known_sequences.h"
#include "host/makespan.h"
#include "kernel.h"
#include "params.h"
#include "sm80/key_block.h"

namespace flash::sm80 {

// Of what is read again and again, this much should stay in the L2 cache.
constexpr int64_t kTogetherBytes = 32 << 20;

// Where dQ is added to in order, thread blocks of one head wait for each other: fewer of them run
// at a time if more heads do.
constexpr int64_t kOrderedHeads = 32;

// With equally many parts, of query heads: at most so many thread blocks for each that runs at a
// time, if that takes parts.
constexpr int64_t kRounds = 4;

// Unequal parts are tried if there are so few blocks of keys for each that runs at a time.
constexpr int64_t kUnequalRounds = 4, kMostUnequalParts = 64, kLeastSteps = 2;

// In steps: what comes before and after those of a thread block, leaving its part, and adding one.
constexpr float kEnds = 1.f, kLeave = 0.3f, kAdd = 0.5f;

// Blocks of keys. Heads of several sequences wait less for each other than one head's blocks, so dQ
// that is added to in order does not take one sequence after the other.
inline SequenceTiles key_tiles(const BackwardParams& params, int block_n) {
  const SequenceTiles tiles = SequenceTiles::of_keys(params, block_n);
  return params.deterministic ? tiles.equally_many() : tiles.fewest();
}

// Heads of K and V, over the batch if tiles are not packed.
inline int64_t all_heads(const BackwardParams& params, const SequenceTiles& tiles) {
  return int64_t{tiles.packed() ? 1 : params.batch} * params.nheads_kv;
}

// Thread blocks.
inline int64_t count_parts(const BackwardParams& params, const SequenceTiles& tiles,
                           const KeyBlockOrder& order) {
  return all_heads(params, tiles) * order.blocks * order.splits;
}

// All blocks of keys of a head in parts of so many steps, or fewer.
// lengths: their steps
inline UnequalParts divide_unequally(const std::vector<int64_t>& lengths, int64_t steps) {
  UnequalParts unequal{};
  for (const int64_t length : lengths) {
    const int64_t parts = std::max<int64_t>((length + steps - 1) / steps, 1);
    unequal.first[unequal.blocks + 1] = unequal.first[unequal.blocks] + static_cast<int>(parts);
    ++unequal.blocks;
  }
  return unequal;
}

// How long all thread blocks take, in steps.
// parts_of(i), longest_of(i): parts of block i of a head, and the steps of its longest part
template <typename PartsOf, typename LongestOf>
float predicted_steps(int64_t blocks, int64_t heads, int workers, PartsOf parts_of,
                      LongestOf longest_of) {
  std::vector<Work> all;
  int64_t most = 1;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t parts = parts_of(i);
    const float leave = parts > 1 ? kLeave : 0;
    all.push_back({heads * parts, kEnds + leave + static_cast<float>(longest_of(i))});
    most = std::max(most, parts);
  }
  return makespan(all, workers) + (most > 1 ? kAdd * static_cast<float>(most) : 0);
}

// For a kernel with steps of block_m queries and blocks of block_n keys.
// row_bytes: of Q, dO and dQ of a query; workers: thread blocks that run at a time
inline KeyBlockOrder plan_key_blocks(const BackwardParams& params, int block_m, int block_n,
                                     int64_t row_bytes, int workers) {
  const SequenceTiles tiles = key_tiles(params, block_n);
  const int64_t heads = all_heads(params, tiles), all = tiles.count() * params.nheads_kv;
  if (all > INT_MAX) {
    throw std::invalid_argument("batch * nheads_kv * key blocks: got " + std::to_string(all) +
                                "; accepted: up to 2^31 - 1");
  }
  const int64_t least = params.deterministic ? kOrderedHeads : 1;
  const int64_t together = kTogetherBytes / (params.seqlen_q * row_bytes);
  KeyBlockOrder order{static_cast<int>(all / heads),
                      static_cast<int>(std::min(std::max(together, least), heads)),
                      1,
                      {}};
  if (all == 0 || all >= kKeptZero) return order;
  const int64_t group = params.nheads / params.nheads_kv;
  const int64_t wanted = std::min(kRounds * workers, int64_t{kKeptZero});
  order.splits = static_cast<int>(std::clamp<int64_t>(wanted / all, 1, group));
  // A thread block multiplies its steps by its part.
  const int64_t steps_of_block = group * ((params.seqlen_q + block_m - 1) / block_m);
  order.splits = static_cast<int>(std::min<int64_t>(order.splits, INT_MAX / steps_of_block));
  if (params.cu_seqlens_k != nullptr || params.deterministic || order.blocks > kMostUnequalBlocks ||
      all > kUnequalRounds * workers || steps_of_block > INT_MAX / kMostUnequalParts) {
    return order;
  }

  const KnownSequences sequences(params, params.batch, params.seqlen_q, params.seqlen_k);
  std::vector<int64_t> lengths;
  for (int64_t key = 0; key < params.seqlen_k; key += block_n) {
    lengths.push_back(group * sequences.query_steps(key, key + block_n, block_m));
  }
  const int64_t blocks = order.blocks, most = *std::max_element(lengths.begin(), lengths.end());
  float best = predicted_steps(
      blocks, heads, workers, [&](int64_t) { return order.splits; },
      [&](int64_t i) { return (lengths[i] + order.splits - 1) / order.splits; });
  float even = 0;
  for (const int64_t length : lengths) even += 1.f * heads * length / workers;
  for (float relative = 0.5f; relative < 2; relative *= 1.1f) {
    const auto steps = std::max<int64_t>(std::ceil(even * relative), kLeastSteps);
    if (most > kMostUnequalParts * steps) continue;
    const UnequalParts unequal = divide_unequally(lengths, steps);
    const int parts = unequal.first[blocks];
    if (parts == blocks || heads * parts > kKeptZero) continue;
    const auto parts_of = [&](int64_t i) { return unequal.first[i + 1] - unequal.first[i]; };
    const float time = predicted_steps(blocks, heads, workers, parts_of, [&](int64_t i) {
      return (lengths[i] + parts_of(i) - 1) / parts_of(i);
    });
    if (time >= best) continue;
    best = time;
    order.blocks = parts, order.splits = 1, order.unequal = unequal;
  }
  return order;
}

}  // namespace flash::sm80
