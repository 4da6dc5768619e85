#include "sm90/backward_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "host/known_sequences.h"
#include "host/launch.h"
#include "host/makespan.h"
#include "kernel.h"

namespace flash::sm90 {
namespace {

constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr int kLeastSteps = 2;  // of a part of the longest tile

// Of the tiles left over: their parts take memory, and each has its ends.
constexpr int kMostSplits = 32, kMostRounds = 2;

// What the tiles of a section read again and again takes about this much of the L2 cache: Q, dO and
// dQ of one query head of each group. Tiles go from one to the next nearly in step.
constexpr int64_t kSectionBytes = 24 << 20;

// How much faster it must be predicted to be that more heads than that run together: a guess.
constexpr float kBeyondCache = 1.05f;

// Where dQ is added to in order, tiles of one head wait for each other: fewer of them run at a time
// if more heads do.
constexpr int64_t kOrderedHeads = 16;

// Microseconds on an H200.
struct PartTimes {
  float ends;   // what comes before and after the steps of a part
  float step;   // over a block of queries
  float leave;  // if there are several parts: dK and dV of one, in float32
  float sum;    // of these, by all SMs, for one part
};

constexpr float kSumLaunch = 3.f;

PartTimes part_times(int block_n, int headdim, int headdim_v) {
  const float bytes = 4.f * block_n * (headdim + headdim_v);
  const float sum = bytes / 2.5e6f;  // at 2.5 TB/s, most of it from the L2 cache
  if (headdim > 128) return {6.f, headdim > 192 ? 2.6f : 2.f, bytes / 60e3f, sum};
  const float step = headdim <= 64 ? 2.75f : headdim <= 96 ? 1.85f : 2.3f;
  return {4.f, step, bytes / 30e3f, sum};
}

// Heads alike.
struct HeadWork {
  int64_t heads;
  std::vector<int64_t> steps;  // of their tiles, from the first keys on
};

std::vector<HeadWork> backward_work(const BackwardParams& params, int block_m, int block_n) {
  const int group = params.nheads / params.nheads_kv;
  std::vector<HeadWork> all;
  for (const KnownSequences& sequences : known_sequences(params)) {
    HeadWork work{sequences.count() * params.nheads_kv, {}};
    for (int64_t key = 0; key < sequences.keys(); key += block_n) {
      work.steps.push_back(group * sequences.query_steps(key, key + block_n, block_m));
    }
    all.push_back(work);
  }
  return all;
}

// Microseconds, with parts in the scheduler's order.
// section: parts of heads whose tiles are handed out together
float predicted_time(const std::vector<HeadWork>& work, const PartTimes& times, int splits,
                     int64_t section, int workers) {
  const float ends = times.ends + (splits > 1 ? times.leave : 0);
  int64_t tiles = 0;
  std::vector<Work> parts;
  for (const HeadWork& x : work) {
    tiles += x.heads * x.steps.size();
    for (int64_t left = x.heads * splits, some; left > 0; left -= some) {
      // The last section is a whole one.
      some = left > section ? std::min(section, left - section) : left;
      for (const int64_t steps : x.steps) {
        parts.push_back({some, ends + (steps + splits - 1) / splits * times.step});
      }
    }
  }
  return makespan(parts, workers) + (splits > 1 ? kSumLaunch + tiles * splits * times.sum : 0);
}

// When all workers have had equally many tiles, those left over keep some busy while the others
// wait. If all tiles are equally long, these alone may be divided.
// steps: of a tile; time: predicted if they are not
BackwardPlan divide_leftover(BackwardPlan plan, const PartTimes& times, int64_t tiles,
                             int64_t steps, int workers, float time) {
  const int64_t leftover = tiles % workers;
  const float whole = tiles / workers * (times.ends + steps * times.step);
  for (int splits = 2; splits <= kMostSplits && kLeastSteps * splits <= steps; ++splits) {
    const int64_t parts = leftover * splits, rounds = (parts + workers - 1) / workers;
    if (rounds > kMostRounds) break;
    const float part = times.ends + times.leave + (steps + splits - 1) / splits * times.step;
    const float divided = whole + rounds * part + kSumLaunch + parts * times.sum;
    if (divided >= time) continue;
    time = divided;
    plan.splits = splits;
    plan.whole = static_cast<int>(tiles - leftover);
  }
  return plan;
}

}  // namespace

BackwardPlan plan_backward(const BackwardParams& params, int block_m, int block_n, int workers,
                           int headdim, int headdim_v) {
  const int64_t heads = int64_t{params.batch} * params.nheads_kv;
  const int64_t tiles = heads * ((params.seqlen_k + block_n - 1) / block_n);
  const int group = params.nheads / params.nheads_kv;
  const int64_t head_bytes =
      int64_t{params.seqlen_q} * (2 * (params.headdim + params.headdim_v) + 4 * headdim);
  const bool packed = params.cu_seqlens_k != nullptr;
  const auto fits_cache = [&](int64_t section, int splits) {
    return section * head_bytes <= kSectionBytes * std::max(1, splits / group);
  };
  // Sections are all heads, a half of them, a quarter, until they fit. Packed sequences have none.
  const int64_t least_section =
      packed ? INT64_MAX : std::min(params.deterministic ? kOrderedHeads : 1, heads);
  int64_t cached = heads;
  while (!fits_cache(cached, 1) && cached / 2 >= least_section) cached /= 2;
  BackwardPlan best{1, static_cast<int>(cached), static_cast<int>(tiles)};
  if (tiles == 0) return best;

  const PartTimes times = part_times(block_n, headdim, headdim_v);
  const std::vector<HeadWork> work = backward_work(params, block_m, block_n);
  int64_t least_steps = INT64_MAX, most_steps = 0;
  for (const HeadWork& x : work) {
    for (const int64_t steps : x.steps) {
      least_steps = std::min(least_steps, steps);
      most_steps = std::max(most_steps, steps);
    }
  }
  const bool many = tiles > int64_t{kManyPieces} * workers;
  float least = INFINITY;
  if (many) {
    least = (tiles + workers - 1) / workers * (times.ends + most_steps * times.step);
  } else {
    for (const int splits : kSplits) {
      if (splits > 1 && most_steps < kLeastSteps * splits) break;
      // Where dQ is added to in order, parts of one query head wait for each other.
      const int64_t unit = params.deterministic && group % splits != 0 ? splits : 1;
      for (int64_t units = heads * splits / unit;; units /= 2) {
        const int64_t section = units * unit;
        const bool fits = fits_cache(section, splits);
        const float time = (fits ? 1.f : kBeyondCache) *
                           predicted_time(work, times, splits,
                                          packed ? params.nheads_kv * splits : section, workers);
        if (time < least) {
          least = time;
          best = {splits, static_cast<int>(section), splits == 1 ? static_cast<int>(tiles) : 0};
        }
        if (fits || units / 2 * unit < least_section) break;
      }
    }
  }
  if (packed || params.deterministic || least_steps < most_steps) return best;
  return divide_leftover(best, times, tiles, most_steps, workers, least);
}

}  // namespace flash::sm90
