// Which tile shape a Hopper forward runs with and into how many parts the keys of a tile are
// divided: what is predicted to take the least time. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "host/launch.h"
#include "host/makespan.h"
#include "kernel.h"
#include "params.h"
#include "sm90/forward_config.cuh"

namespace flash::sm90 {

// Microseconds that the merging of parts takes: once, and for each part of a tile of 128 columns.
constexpr float kMergeTime = 2.2f;
constexpr float kMergePartTime = 0.7f;

constexpr int kMostSplits = 16;
constexpr int kLeastSteps = 2;  // over the keys of a part

struct ForwardPlan {
  int tile;
  int splits;
};

// All heads of a group share a tile if that saves tiles: with one query a tile is nearly empty.
inline int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m) {
  const int group = params.nheads / params.nheads_kv;
  if (features == FeatureSet::kFull || group == 1 || group > block_m) return 1;
  const auto tiles = [&](int rows) { return (params.seqlen_q + rows - 1) / rows; };
  return tiles(block_m / group) < group * tiles(block_m) ? group : 1;
}

// What a launch has to do: the blocks of queries of a sequence, the last first, each with the steps
// over the keys that it sees. Of packed sequences as if all had the mean length.
struct ForwardWork {
  int64_t heads;  // of tiles, over all sequences
  int64_t tiles;  // at most
  std::vector<int> steps;
};

inline ForwardWork forward_work(const ForwardParams& params, FeatureSet features,
                                const ForwardTile& tile) {
  const auto mean = [&](const int* cu_seqlens, int total, int longest) {
    return cu_seqlens == nullptr ? longest : std::min((total - 1) / params.batch + 1, longest);
  };
  const int64_t queries = mean(params.cu_seqlens_q, params.total_q, params.seqlen_q);
  const int64_t keys = mean(params.cu_seqlens_k, params.total_k, params.seqlen_k);
  const int group = heads_in_tile(params, features, tile.block_m), rows = tile.block_m / group;
  ForwardWork work{int64_t{params.batch} * params.nheads / group, 0, {}};
  work.tiles = work.heads * ((params.seqlen_q + rows - 1) / rows);
  for (int64_t first = (queries - 1) / rows * rows; first >= 0; first -= rows) {
    const int64_t position = first + keys - queries;
    const int64_t last = std::min(first + rows, queries) - 1 + keys - queries;
    const int64_t begin = params.window_left < 0 ? 0 : std::max(position - params.window_left, {});
    const int64_t end =
        params.window_right < 0 ? keys : std::min(keys, last + params.window_right + 1);
    const int64_t blocks = begin < end ? (end - 1) / tile.block_n - begin / tile.block_n + 1 : 0;
    work.steps.push_back(static_cast<int>(blocks));
  }
  return work;
}

// Microseconds on an H200, beside those of a launch that does nothing.
inline float predicted_time(const ForwardWork& work, const ForwardTile& tile, int splits,
                            int headdim_v) {
  const int64_t tiles = work.heads * splits * static_cast<int64_t>(work.steps.size());
  const int sms = multiprocessors();
  const bool shared = tile.streams == 2 && tiles > sms;
  std::vector<Work> all;
  all.reserve(work.steps.size());
  for (const int steps : work.steps) {
    const int of_part = (steps + splits - 1) / splits;
    all.push_back({work.heads * splits, tile.ends + static_cast<float>(of_part) *
                                                        (shared ? tile.shared_step : tile.step)});
  }
  float time = makespan(all, shared ? 2 * sms : sms);
  if (splits > 1) {
    const float rounds = std::max(1.f, static_cast<float>(tiles) / sms);
    time += kMergeTime + kMergePartTime * rounds * splits * headdim_v / 128;
  }
  return time;
}

// Whether a part has enough of the keys, and few enough parts are merged at the same time.
inline bool may_divide(const ForwardWork& work, const ForwardTile& tile, int splits) {
  const int most_steps = *std::max_element(work.steps.begin(), work.steps.end());
  return most_steps >= kLeastSteps * splits && work.tiles * splits <= 2 * multiprocessors() &&
         1 + work.tiles * tile.block_m / 16 <= kKeptZero;
}

// Of the tile shapes 0 .. tiles - 1, and of what the parameters leave open.
inline ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                                int headdim_v, int tiles) {
  ForwardPlan best{0, 1};
  float least = INFINITY;
  for (int choice = 0; choice < tiles; ++choice) {
    if (params.tile >= 0 && choice != params.tile) continue;
    const ForwardTile tile = forward_tile(headdim, headdim_v, features, choice);
    const ForwardWork work = forward_work(params, features, tile);
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      const bool allowed = params.num_splits > 0
                               ? splits == std::min(params.num_splits, kMostSplits)
                               : splits == 1 || may_divide(work, tile, splits);
      if (!allowed) continue;
      const float time = predicted_time(work, tile, splits, headdim_v);
      if (time < least) {
        least = time;
        best = {choice, splits};
      }
    }
  }
  return best;
}

}  // namespace flash::sm90
