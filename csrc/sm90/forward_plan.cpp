#include "sm90/forward_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "host/launch.h"
#include "host/makespan.h"
#include "kernel.h"
#include "sm90/forward_tile.h"

namespace flash::sm90 {
namespace {

constexpr int kMostSplits = 16;
constexpr int kLeastSteps = 2;  // over the keys of a part

// Microseconds on an H200, fitted to what benchmarks/tiles.py measured.
struct TileTimes {
  float ends;         // what comes before and after the steps of a tile
  float step;         // over a block of keys
  float shared_step;  // the same, if two streams share an SM
  // Of the merging of a tile's parts: once, and for each part.
  float merge, merge_part;
};

TileTimes tile_times(int headdim, int headdim_v, const ForwardTile& tile) {
  const bool wide = tile.block_m == 192;
  switch (headdim) {
    case 64:
      if (tile.streams == 2) return {2.97f, 0.50f, 0.86f, 2.05f, 0.20f};
      return wide ? TileTimes{3.53f, 1.11f, 0, 2.05f, 0.20f}
                  : TileTimes{2.97f, 0.99f, 0, 2.05f, 0.20f};
    case 96:
      if (tile.streams == 2) return {1.77f, 0.53f, 1.05f, 2.48f, 0.40f};
      return wide ? TileTimes{3.41f, 1.13f, 0, 2.48f, 0.40f}
                  : TileTimes{2.11f, 0.95f, 0, 2.48f, 0.40f};
    case 128:
      return wide ? TileTimes{2.12f, 0.98f, 0, 2.02f, 0.97f}
                  : TileTimes{2.17f, 1.45f, 0, 2.02f, 0.97f};
    case 192:
      if (headdim_v == 128) {
        return tile.block_n == 64 ? TileTimes{1.17f, 0.95f, 0, 1.55f, 1.21f}
                                  : TileTimes{3.01f, 1.52f, 0, 1.55f, 1.21f};
      }
      return tile.block_n == 64 ? TileTimes{2.58f, 1.03f, 0, 2.72f, 1.11f}
                                : TileTimes{3.25f, 1.38f, 0, 2.72f, 1.11f};
    default:
      return tile.block_n == 64 ? TileTimes{2.90f, 1.25f, 0, 4.09f, 1.14f}
                                : TileTimes{3.75f, 1.62f, 0, 4.09f, 1.14f};
  }
}

// What a launch has to do: the blocks of queries of a sequence, the last first, each with the steps
// over the keys that it sees. Of packed sequences as if all had the mean length.
struct ForwardWork {
  int64_t heads;  // of tiles, over all sequences
  int64_t tiles;  // at most
  std::vector<int> steps;
};

ForwardWork forward_work(const ForwardParams& params, FeatureSet features,
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

// Microseconds, beside those of a launch that does nothing.
float predicted_time(const ForwardWork& work, const TileTimes& times, int streams, int splits) {
  const int64_t tiles = work.heads * splits * static_cast<int64_t>(work.steps.size());
  const int sms = multiprocessors();
  const bool shared = streams == 2 && tiles > sms;
  const float step = shared ? times.shared_step : times.step;
  std::vector<Work> all;
  all.reserve(work.steps.size());
  for (const int steps : work.steps) {
    const int of_part = (steps + splits - 1) / splits;
    all.push_back({work.heads * splits, times.ends + static_cast<float>(of_part) * step});
  }
  float time = makespan(all, shared ? 2 * sms : sms);
  if (splits > 1) {
    const float rounds = std::max(1.f, static_cast<float>(tiles) / sms);
    time += times.merge + times.merge_part * rounds * splits;
  }
  return time;
}

// Whether a part has enough of the keys, and few enough parts are merged at the same time.
bool may_divide(const ForwardWork& work, const ForwardTile& tile, int splits) {
  const int most_steps = *std::max_element(work.steps.begin(), work.steps.end());
  return most_steps >= kLeastSteps * splits && work.tiles * splits <= 2 * multiprocessors() &&
         1 + work.tiles * tile.block_m / 16 <= kKeptZero;
}

}  // namespace

int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m) {
  const int group = params.nheads / params.nheads_kv;
  if (features == FeatureSet::kFull || group == 1 || group > block_m) return 1;
  const auto tiles = [&](int rows) { return (params.seqlen_q + rows - 1) / rows; };
  return tiles(block_m / group) < group * tiles(block_m) ? group : 1;
}

ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                         int headdim_v) {
  const int tiles = count_forward_tiles(headdim, headdim_v, features);
  ForwardPlan best{0, 1};
  float least = INFINITY;
  for (int choice = 0; choice < tiles; ++choice) {
    if (params.tile >= 0 && choice != params.tile) continue;
    const ForwardTile tile = forward_tile(headdim, headdim_v, features, choice);
    const TileTimes times = tile_times(headdim, headdim_v, tile);
    const ForwardWork work = forward_work(params, features, tile);
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      const bool allowed = params.num_splits > 0
                               ? splits == std::min(params.num_splits, kMostSplits)
                               : splits == 1 || may_divide(work, tile, splits);
      if (!allowed) continue;
      const float time = predicted_time(work, times, tile.streams, splits);
      if (time < least) {
        least = time;
        best = {choice, splits};
      }
    }
  }
  return best;
}

}  // namespace flash::sm90
