// Which probabilities dropout keeps: a pure function of (seed, offset, batch, head, row, column),
// the same as flash_attn/_backends/philox.py.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash {

// Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
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

// The dropout mask of one head of one sequence.
struct Dropout {
  bool enabled;
  float scale;  // of what is kept
  uint32_t bound, batch_head, offset;
  uint2 seed;

  __device__ Dropout(const AttentionParams& params, int batch, int head)
      : enabled(params.rng_state != nullptr),
        scale(params.dropout_scale),
        bound(params.dropout_bound),
        batch_head(batch * params.nheads + head),
        offset(0),
        seed{0, 0} {
    if (!enabled) return;
    const auto bits = static_cast<uint64_t>(params.rng_state[0]);
    seed = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
    offset = static_cast<uint32_t>(params.rng_state[1]);
  }

  // What it keeps in the 16 x 16 block of scores at (16 * row_tile, 16 * col_tile), of those that
  // the lane holds in two neighbouring accumulators of m16n8: bit 4 * n + j is place j of the n-th.
  __device__ uint32_t keep_bits(int row_tile, int col_tile, int lane) const {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 words =
          philox_4x32({static_cast<uint32_t>(col_tile * 8 + lane % 4 * 2 + j),
                       static_cast<uint32_t>(row_tile * 8 + lane / 4), batch_head, offset},
                      seed);
      bits |= (words.x > bound) << j | (words.y > bound) << (4 + j) | (words.z > bound) << (2 + j) |
              (words.w > bound) << (6 + j);
    }
    return bits;
  }
};

}  // namespace flash
