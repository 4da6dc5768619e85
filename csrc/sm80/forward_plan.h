// Which tile shape an Ampere-class forward runs with: what is predicted to take the least time.
// Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/known_sequences.h"
#include "host/launch.h"
#include "host/makespan.h"
#include "params.h"
#include "sm80/forward_config.cuh"
#include "sm80/tile_choice.h"

namespace flash::sm80 {

struct ForwardShape {
  ForwardTile tile;
  size_t shared_bytes;
};

// Microseconds on an H200, beside those of a launch that does nothing. At most `fitting` thread
// blocks run on an SM at once.
inline float predicted_time(const ForwardParams& params, const ForwardTile& tile, int fitting) {
  const std::vector<KnownSequences> sequences = known_sequences(params);
  int64_t blocks = 0;
  for (const KnownSequences& x : sequences) {
    blocks += x.count() * params.nheads * ((x.queries() - 1) / tile.block_m + 1);
  }
  const int sms = multiprocessors();
  const int on_sm = static_cast<int>(std::min<int64_t>((blocks - 1) / sms + 1, fitting));
  float step = tile.step;  // the more thread blocks, the longer
  if (on_sm > 1) step += (tile.shared_step - step) * (on_sm - 1) / (tile.blocks_per_sm - 1);
  const int workers = sms * on_sm;
  // The grid has one sequence after the other; of many thread blocks the order matters little.
  const bool in_order = blocks <= int64_t{kManyPieces} * workers;
  // If all run at once, a long one has more of its SM when its neighbours are done.
  float most_shared = INFINITY;
  if (blocks <= workers) {
    most_shared = 0.f;
    for (const KnownSequences& x : sequences) {
      for (int64_t first = 0; first < x.queries(); first += tile.block_m) {
        const auto steps = static_cast<float>(x.steps(first, first + tile.block_m, tile.block_n));
        most_shared += steps * x.count() * params.nheads / blocks;
      }
    }
  }
  std::vector<Work> all;
  for (const KnownSequences& x : sequences) {
    for (int64_t i = 0; i < (in_order ? x.count() : 1); ++i) {
      const int64_t rows = tile.block_m, heads = params.nheads * (in_order ? 1 : x.count());
      for (int64_t first = (x.queries() - 1) / rows * rows; first >= 0; first -= rows) {
        const auto steps = static_cast<float>(x.steps(first, first + rows, tile.block_n));
        const float shared = std::min(steps, most_shared);
        all.push_back({heads, tile.ends + (steps - shared) * tile.step + shared * step});
      }
    }
  }
  return makespan(all, workers);
}

// The place of a shape of which at least one thread block fits the shared memory.
template <size_t kShapes>
int choose_forward_tile(const ForwardParams& params, const ForwardShape (&shapes)[kShapes]) {
  int best = -1;
  float least_time = INFINITY;
  size_t least_bytes = SIZE_MAX;
  for (int i = 0; i < static_cast<int>(kShapes); ++i) {
    if (params.tile >= 0 && i != params.tile) continue;
    const auto& [tile, shared_bytes] = shapes[i];
    least_bytes = std::min(least_bytes, shared_bytes);
    const int fitting =
        std::min(fitting_blocks(shared_bytes, params.shared_memory), tile.blocks_per_sm);
    if (fitting < 1) continue;
    const float time = predicted_time(params, tile, fitting);
    if (time < least_time) {
      least_time = time;
      best = i;
    }
  }
  if (best >= 0) return best;
  if (params.tile >= 0) {
    throw std::invalid_argument("tile: got " + std::to_string(params.tile) + ", which takes " +
                                std::to_string(least_bytes) +
                                " bytes of shared memory; accepted: those that take at most " +
                                std::to_string(params.shared_memory));
  }
  refuse_shared_memory(params.shared_memory, params.headdim, params.headdim_v, least_bytes);
}

}  // namespace flash::sm80
