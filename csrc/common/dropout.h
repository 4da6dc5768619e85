// Which probabilities dropout keeps: a pure function of (seed, offset, batch, head, row, column),
// the same as flash_attn/_backends/philox.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/fragment.h"
#include "params.h"
#include "ptx/opaque.h"

namespace flash {

// Philox of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), with 10 rounds
// of four words and with 7 of two.
__device__ inline uint4 philox_4x32(uint4 counter, uint2 key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(counter.x) * kMultiplier0;
    const uint64_t product1 = static_cast<uint64_t>(counter.z) * kMultiplier1;
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(product0)};
    key.x += kWeyl0;
    key.y += kWeyl1;
  }
  return counter;
}
__device__ inline uint2 philox_2x32(uint2 counter, uint32_t key) {
  constexpr uint32_t kMultiplier = 0xD256D193, kWeyl = 0x9E3779B9;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product = static_cast<uint64_t>(counter.x) * kMultiplier;
    counter = {static_cast<uint32_t>(product >> 32) ^ counter.y ^ key,
               static_cast<uint32_t>(product)};
    key += kWeyl;
  }
  return counter;
}

// What dropout keeps of a 16 x 16 block of scores, of those that a lane holds in two neighbouring
// accumulators of m16n8 (ptx/mma_sync.h). The two words of an output of Philox are those of queries
// i and i + 8; their lower and upper halves are those of keys j and j + 8.
template <Rows kRows>
struct KeptOfBlock {
  uint32_t bound;
  uint2 words[2];  // columns 2 * t and 2 * t + 1

  // Place j of accumulator n (0 or 1).
  __device__ bool operator()(int n, int j) const {
    const Place behind = place_behind<kRows>(0, n, j);
    const uint32_t word = behind.query < 8 ? words[j % 2].x : words[j % 2].y;
    return (behind.key < 8 ? word << 16 : word) > bound;
  }
};

// The dropout mask of one head of one sequence.
struct Dropout {
  bool enabled;
  float scale;  // of what is kept
  uint32_t bound, head_key;
  const AttentionParams& params;

  __device__ Dropout(const AttentionParams& params, int batch, int head)
      : Dropout(params, head_key_of(params, batch, head)) {}
  // Of a head whose key is known.
  __device__ Dropout(const AttentionParams& params, uint32_t head_key)
      : enabled(params.rng_state != nullptr),
        scale(params.dropout_scale),
        bound(params.dropout_bound),
        head_key(head_key),
        params(params) {}

  // Reads memory.
  static __device__ uint32_t head_key_of(const AttentionParams& params, int batch, int head) {
    if (params.rng_state == nullptr) return 0;
    const auto seed = static_cast<uint64_t>(params.rng_state[0]);
    const auto offset = static_cast<uint32_t>(params.rng_state[1]);
    const int nheads = params.place_nheads > 0 ? params.place_nheads : params.nheads;
    const int index = (params.place_batch + batch) * nheads + params.place_head + head;
    return philox_4x32({static_cast<uint32_t>(index), 0, 0, offset},
                       {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})
        .x;
  }

  // Of the block of scores at query 16 * query_tile and key 16 * key_tile.
  template <Rows kRows = Rows::kQueries>
  __device__ KeptOfBlock<kRows> kept(int query_tile, int key_tile, int lane) const {
    const Place first = first_place<kRows>(lane), next = place_behind<kRows>(0, 0, 1);
    const uint32_t query = query_tile * 8 + first.query + params.place_row / 2u;
    const uint32_t key = key_tile * 8 + first.key + params.place_column / 2u;
    return {bound,
            {philox_2x32({key, query}, head_key),
             philox_2x32({key + next.key, query + next.query}, head_key)}};
  }
};

// Gives what dropout drops a minus sign.
// p: probabilities, accumulators of m16n8, from query 16 * query_tile and key 16 * key_tile on
template <Rows kRows = Rows::kQueries, int kRowTiles, int kColTiles>
__device__ void mark_dropped(float (&p)[kRowTiles][kColTiles][4], const Dropout& dropout,
                             int query_tile, int key_tile, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      const Place behind = place_of<kRows>(m, n / 2);
      const auto kept = dropout.kept<kRows>(query_tile + behind.query, key_tile + behind.key, lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& entry = p[m][n + i / 4][i % 4];
        if (!kept(i / 4, i % 4)) entry = -entry;
      }
    }
  }
}

// dS = P * (dP - delta), of a P that may be marked: then dP is zero, else it is to be scaled.
__device__ inline float gradient_of_marked(float p, float dp, float delta, float dropout_scale) {
  // Without `opaque`, the scale would be loaded for each score, under a condition.
  const float of_kept = ptx::opaque(fmaf(dp, dropout_scale, -delta));
  return p * (signbit(p) ? delta : of_kept);
}

}  // namespace flash
