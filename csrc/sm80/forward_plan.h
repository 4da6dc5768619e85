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

#include "host/launch.h"
#include "host/makespan.h"
#include "host/mean_sequence.h"
#include "params.h"
#include "sm80/forward_config.cuh"
#include "sm80/tile_choice.h"

namespace flash::sm80 {

struct ForwardShape {
  ForwardTile tile;
  size_t shared_bytes;
};

// Of each block of queries of a sequence, the last first, the steps over the keys that it sees.
inline std::vector<int> steps_of_blocks(const ForwardParams& params, const ForwardTile& tile) {
  const MeanSequence sequence(params);
  const int rows = tile.block_m;
  std::vector<int> all;
  for (int64_t first = (sequence.queries() - 1) / rows * rows; first >= 0; first -= rows) {
    all.push_back(static_cast<int>(sequence.steps(first, first + rows, tile.block_n)));
  }
  return all;
}

// Microseconds on an H200, beside those of a launch that does nothing. At most `fitting` thread
// blocks run on an SM at once.
inline float predicted_time(const ForwardParams& params, const ForwardTile& tile, int fitting) {
  const std::vector<int> steps = steps_of_blocks(params, tile);
  const int64_t blocks = int64_t{params.batch} * params.nheads * static_cast<int64_t>(steps.size());
  const int sms = multiprocessors();
  const int on_sm = static_cast<int>(std::min<int64_t>((blocks - 1) / sms + 1, fitting));
  float step = tile.step;  // the more thread blocks, the longer
  if (on_sm > 1) step += (tile.shared_step - step) * (on_sm - 1) / (tile.blocks_per_sm - 1);
  const int workers = sms * on_sm;
  // The grid has one sequence after the other; of many thread blocks the order matters little.
  const int sequences = blocks > int64_t{kManyPieces} * workers ? 1 : params.batch;
  std::vector<Work> all;
  all.reserve(sequences * steps.size());
  for (int i = 0; i < sequences; ++i) {
    for (const int count : steps) {
      all.push_back({int64_t{params.batch} / sequences * params.nheads,
                     tile.ends + static_cast<float>(count) * step});
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
