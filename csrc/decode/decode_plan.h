// Into how many parts the decode kernel divides the keys of a tile: what is predicted to take the
// least time, from shapes alone. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host/known_sequences.h"
#include "params.h"

namespace flash::decode {

// tiles: of the launch; step_keys, step_bytes: of K and V in a step of a thread block; part_bytes:
// that a part leaves for the merge; slots: thread blocks that run at a time
inline int choose_splits(const ForwardParams& params, int64_t tiles, int step_keys,
                         int64_t step_bytes, int64_t part_bytes, int64_t slots, int most_splits) {
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), step_keys));
  }
  most_splits = static_cast<int>(std::min<int64_t>(steps, most_splits));
  if (params.num_splits > 0) return std::min(params.num_splits, most_splits);

  // Fitted to an H200: head dims 64 to 256, 1 to 2048 tiles, 1k to 64k keys. Microseconds; bytes of
  // a microsecond, of all SMs and of one. Few thread blocks take as long as kLeastBusy.
  constexpr float kEnds = 3.2f, kMerge = 3.7f;
  constexpr float kBytes = 4.58e6f, kBytesOfOne = 75e3f, kLeastBusy = 81;
  const auto round = [&](int64_t blocks, int64_t block_steps) {
    if (blocks == 0) return 0.f;
    const float busy = std::max(static_cast<float>(blocks), kLeastBusy);
    return kEnds + static_cast<float>(block_steps * step_bytes) * busy / kBytes;
  };
  int best = 1;
  float least = INFINITY;
  for (int splits = 1; splits <= most_splits; ++splits) {
    const int64_t blocks = tiles * splits, block_steps = (steps + splits - 1) / splits;
    float time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                 round(blocks % slots, block_steps);
    if (splits > 1) time += kMerge + static_cast<float>(splits * part_bytes) / kBytesOfOne;
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

}  // namespace flash::decode
