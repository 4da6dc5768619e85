// Which tile shape an Ampere-class forward runs with and into how many parts the keys of a tile are
// divided: what is predicted to take the least time. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/divided_keys.h"
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

struct ForwardPlan {
  int tile;
  int splits;  // parts of a tile's keys
};

constexpr int kMostSplits = 32;
// What the parts of a launch leave takes at most so much memory, but that of one block of queries
// of all heads, whatever it takes.
constexpr int64_t kMostPartBytes = 64 << 20;

// Microseconds on an H200, beside those of a launch that does nothing. At most `fitting` thread
// blocks run on an SM at once.
inline float predicted_time(const ForwardParams& params, const ForwardTile& tile, int fitting,
                            int splits, int headdim_v) {
  const std::vector<KnownSequences> sequences = known_sequences(params);
  int64_t blocks = 0;
  for (const KnownSequences& x : sequences) {
    blocks += x.count() * params.nheads * ((x.queries() - 1) / tile.block_m + 1) * splits;
  }
  const auto steps_of = [&](const KnownSequences& x, int64_t first) {
    const int64_t steps = x.steps(first, first + tile.block_m, tile.block_n);
    return static_cast<float>((steps + splits - 1) / splits);
  };
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
        most_shared += steps_of(x, first) * x.count() * params.nheads * splits / blocks;
      }
    }
  }
  std::vector<Work> all;
  for (const KnownSequences& x : sequences) {
    for (int64_t i = 0; i < (in_order ? x.count() : 1); ++i) {
      const int64_t rows = tile.block_m, heads = params.nheads * (in_order ? 1 : x.count());
      for (int64_t first = (x.queries() - 1) / rows * rows; first >= 0; first -= rows) {
        const float steps = steps_of(x, first), shared = std::min(steps, most_shared);
        const float time = tile.ends + (steps - shared) * tile.step + shared * step;
        all.push_back({heads * splits, time + (splits > 1 && blocks > workers ? kLaterPart : 0.f)});
      }
    }
  }
  const float time = makespan(all, workers);
  if (splits == 1) return time;
  return time + merge_time(splits, blocks * tile.block_m * headdim_v);
}

// Numbers of parts that are worth trying, beside 1.
inline std::vector<int> likely_parts(const ForwardParams& params, const ForwardTile& tile,
                                     int fitting, int headdim_v) {
  const int64_t tiles =
      int64_t{params.batch} * params.nheads * ((params.seqlen_q - 1) / tile.block_m + 1);
  const int64_t part_bytes = int64_t{tile.block_m} * headdim_v * static_cast<int>(sizeof(float));
  int64_t most = 0;
  for (const KnownSequences& x : known_sequences(params)) {
    most = std::max(most, x.steps(x.queries() - 1, x.queries(), tile.block_n));
  }
  most = std::min<int64_t>({most, kMostSplits, kMostPartBytes / part_bytes / tiles});
  return likely_splits(tiles, int64_t{multiprocessors()} * fitting, most);
}

// With a shape of which at least one thread block fits the shared memory. Where num_splits is given
// it is the first such shape, whatever else is in the batch.
template <size_t kShapes>
ForwardPlan plan_forward(const ForwardParams& params, int headdim_v,
                         const ForwardShape (&shapes)[kShapes]) {
  if (params.num_splits < 0) {
    throw std::invalid_argument("num_splits: got " + std::to_string(params.num_splits) +
                                "; accepted by the sm80 forward: 0 or more");
  }
  const int given = std::min(params.num_splits, kMostSplits);
  ForwardPlan best{-1, 1};
  float least_time = INFINITY;
  size_t least_bytes = SIZE_MAX;
  for (int i = 0; i < static_cast<int>(kShapes); ++i) {
    if (params.tile >= 0 && i != params.tile) continue;
    const ForwardTile& tile = shapes[i].tile;
    const size_t shared_bytes = shapes[i].shared_bytes;
    least_bytes = std::min(least_bytes, shared_bytes);
    const int fitting =
        std::min(fitting_blocks(shared_bytes, params.shared_memory), tile.blocks_per_sm);
    if (fitting < 1) continue;
    if (given > 0) return {i, given};
    const auto consider = [&](int splits) {
      const float time = predicted_time(params, tile, fitting, splits, headdim_v);
      if (time >= least_time) return;
      least_time = time;
      best = {i, splits};
    };
    consider(1);
    for (int splits : likely_parts(params, tile, fitting, headdim_v)) consider(splits);
  }
  if (best.tile >= 0) return best;
  if (params.tile >= 0) {
    throw std::invalid_argument("tile: got " + std::to_string(params.tile) + ", which takes " +
                                std::to_string(least_bytes) +
                                " bytes of shared memory; accepted: those that take at most " +
                                std::to_string(params.shared_memory));
  }
  refuse_shared_memory(params.shared_memory, params.headdim, params.headdim_v, least_bytes);
}

}  // namespace flash::sm80
