// Into how many parts the decode kernel divides the keys of a tile: what is predicted to take the
// least time, from shapes alone. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host/known_sequences.h"
#include "params.h"

namespace flash::decode {

// tiles: of the launch; step_keys, step_bytes: of K and V in a step of a thread block; slots:
// thread blocks that run at a time
inline int choose_splits(const ForwardParams& params, int64_t tiles, int step_keys,
                         int64_t step_bytes, int64_t slots, int most_splits) {
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), step_keys));
  }
  most_splits = static_cast<int>(std::min<int64_t>(steps, most_splits));
  if (params.num_splits > 0) return std::min(params.num_splits, most_splits);

  // In microseconds. Thread blocks that run at a time share the memory, which is half as fast as it
  // can be with kHalfSpeed of them. These figures are assumptions about an H200, not measured.
  constexpr float kBytesPerUs = 4.2e6f, kHalfSpeed = 70.f;
  constexpr float kEnds = 2.f, kMerge = 1.f, kMergePart = 0.01f;
  const auto round = [&](int64_t blocks, int64_t block_steps) {
    if (blocks == 0) return 0.f;
    return kEnds + static_cast<float>(block_steps * step_bytes) *
                       (static_cast<float>(blocks) + kHalfSpeed) / kBytesPerUs;
  };
  int best = 1;
  float least = INFINITY;
  for (int splits = 1; splits <= most_splits; ++splits) {
    const int64_t blocks = tiles * splits, block_steps = (steps + splits - 1) / splits;
    float time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                 round(blocks % slots, block_steps);
    if (splits > 1) time += kMerge + kMergePart * static_cast<float>(splits);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

}  // namespace flash::decode
