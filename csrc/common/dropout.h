// Which probabilities dropout keeps: a pure function of (seed, offset, batch, head, row, column),
// the same as flash_attn/_backends/philox.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/fragment.h"
#include "params.h"
#include "ptx/movmatrix.h"
#include "ptx/prmt.h"

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

// What dropout drops of a 16 x 16 block of scores, of those that a lane holds in two neighbouring
// accumulators of m16n8 (ptx/mma_sync.h): a byte of `words` for each, with the top bit set.
template <Rows kRows>
struct DroppedOfBlock {
  uint32_t words[2];  // of the lane's two rows

  // Of place j of accumulator n (0 or 1).
  static __device__ constexpr int byte_of(int n, int j) {
    return kRows == Rows::kQueries ? 2 * n + j % 2 : n + j % 2 * 2;
  }

  // Gives the entry a minus sign if it is dropped.
  __device__ void mark(float& entry, int n, int j) const {
    const uint32_t sign = words[j / 2] << (24 - 8 * byte_of(n, j)) & 0x80000000u;
    entry = __uint_as_float(__float_as_uint(entry) | sign);
  }

  // `pair`, places j and j + 1, with zeros for what is dropped.
  __device__ uint32_t keep(uint32_t pair, int n, int j) const {
    static_assert(kRows == Rows::kQueries);
    return pair & ~ptx::spread_signs(words[j / 2], n == 0 ? 0x9988 : 0xbbaa);
  }
};

// The same without dropout.
struct NothingDropped {
  __device__ uint32_t keep(uint32_t pair, int, int) const { return pair; }
};

// The dropout mask of one head of one sequence.
struct Dropout {
  bool enabled;
  float scale;  // of what is kept
  uint32_t head_key;
  const AttentionParams& params;

  __device__ Dropout(const AttentionParams& params, int batch, int head)
      : Dropout(params, head_key_of(params, batch, head)) {}
  // Of a head whose key is known.
  __device__ Dropout(const AttentionParams& params, uint32_t head_key)
      : enabled(params.rng_state != nullptr),
        scale(params.dropout_scale),
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

  // Of the block of scores at query 16 * query_tile and key 16 * key_tile. All lanes of a warp take
  // part.
  template <Rows kRows = Rows::kQueries>
  __device__ DroppedOfBlock<kRows> dropped(int query_tile, int key_tile, int lane) const {
    const uint32_t query = query_tile * 8 + lane / 4 + params.place_row / 2u;
    const uint32_t key = key_tile * 4 + lane % 4 + params.place_column / 4u;
    const uint2 random = philox_2x32({key, query}, head_key);
    const DropoutThreshold& threshold = params.dropout_threshold;
    const uint32_t shared = random.y * 0x9E3779B9u + random.x;
    const uint32_t added = shared < threshold.shared ? threshold.added[1] : threshold.added[0];
    const uint32_t upper = (random.x & 0x7f7f7f7f) + added, lower = (random.y & 0x7f7f7f7f) + added;
    if constexpr (kRows == Rows::kQueries) {
      return {upper, lower};
    } else {
      return {ptx::transpose(__byte_perm(upper, lower, 0x5140)),
              ptx::transpose(__byte_perm(upper, lower, 0x7362))};
    }
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
      const auto dropped =
          dropout.dropped<kRows>(query_tile + behind.query, key_tile + behind.key, lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) dropped.mark(p[m][n + i / 4][i % 4], i / 4, i % 4);
    }
  }
}

// dS / dropout_scale = P * (dP - delta), of a P that may be marked: then dP is zero.
// delta: divided by dropout_scale too
__device__ inline float gradient_of_marked(float p, float dp, float delta) {
  return fmaf(fmaxf(p, 0.f), dp, -fabsf(p) * delta);
}

}  // namespace flash
