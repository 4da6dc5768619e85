#include "sm90/backward_plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "host/known_sequences.h"
#include "host/launch.h"
#include "host/makespan.h"

namespace flash::sm90 {
namespace {

constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr int kLeastSteps = 2;  // of a part of the longest tile

// Of the tiles left over: their parts take memory, and each has its ends.
constexpr int kMostSplits = 32, kMostRounds = 2;

// Tiles have unequally many parts, at most so many, if there are few tiles for each worker.
constexpr int64_t kUnequalTiles = 3, kMostUnequalParts = 64;

// What the parts of all tiles may take in memory: this much, or half of what dQ takes in float32.
// In order, where shorter parts wait less, all of it, as long as a part has so many queries.
constexpr int64_t kPartsBytes = 64 << 20, kOrderedQueries = 16384;

// Where dQ is added to in order, tiles of one head wait for each other: fewer of them run at a time
// if more heads do. So many heads, or heads with so many tiles for each worker, run together; twice
// as many if several query heads read the same keys, where tiles also drift apart.
constexpr int64_t kOrderedHeads = 16;
constexpr float kOrderedTiles = 1.9f;

// From so many tiles for each worker on idle warps work on dQ: with fewer, heads are done together,
// at the end. And from so many additions to each row tile on, in the mean, more where heads share K
// and V.
constexpr int kTilesToIdle = 6;
constexpr float kAdditionsToIdle = 4.5f, kAdditionsOfGroupsToIdle = 8;

// Thread blocks take whole heads if these keep so many workers busy in the mean, more the more
// tiles a head has. And if what is read and added to again and again stays in the L2 cache, or if
// it is not often. Fitted to d64 to d128, 192 to 1024 tokens, groups of 1 to 8 on an H200.
constexpr float kBusyHeads = 0.55f, kBusyBlocks = 0.075f;
constexpr int64_t kHeadsBytes = 40 << 20;
constexpr float kHeadsAdditions = 2.2f;

// The same where lengths differ, of which the host knows little. Fitted to d64 to d128, up to 256
// to 1024 tokens, 1 to 55 heads for each worker on an H200.
constexpr float kBusyUnequalHeads = 0.8f;
constexpr int kUnequalBlocks = 4;  // of the longest sequence, at most
constexpr int64_t kUnequalHeadsBytes = 32 << 20;

// Steps have 80 queries if there are so many, and so many keys. Below, idle warps are worth more.
constexpr int kLongQueries = 5000, kLongKeys = 512;

// How much longer it takes if tiles that run at a time read so much again and again. Fitted, as
// the times of parts, to d64 to d256, groups of 1 to 71, 512 to 16k tokens on an H200, whose L2
// cache has 50 MB.
float cache_factor(float bytes) {
  const auto beyond = [&](int mb) { return std::max(0.f, std::log2(bytes / (mb << 20))); };
  return 1 + 0.01f * beyond(16) + 0.12f * beyond(60);
}

// Microseconds on an H200.
struct PartTimes {
  float ends;   // what comes before and after the steps of a part
  float step;   // over a block of queries
  float leave;  // if there are several parts: dK and dV of one, in float32
  float sum;    // of these, by all SMs, for one part

  // Of so many parts, `most` of one tile: the more, the longer a thread block adds.
  float sums(int64_t parts, int64_t most) const {
    constexpr float kLaunch = 3, kAdd = 0.2f;
    return parts > 0 ? kLaunch + parts * sum + most * kAdd : 0;
  }
};

PartTimes part_times(int block_m, int block_n, int headdim, int headdim_v) {
  const float bytes = 4.f * block_n * (headdim + headdim_v);
  const float sum = bytes / 3e6f;  // at 3 TB/s, most of it from the L2 cache
  if (headdim > 128) return {3.f, headdim > 192 ? 2.6f : 2.1f, bytes / 60e3f, sum};
  const float step = headdim <= 64 ? 2.75f : headdim <= 96 ? 1.85f : 2.3f / 64 * block_m;
  return {4.f, step, bytes / 40e3f, sum};
}

// Heads of K and V that are alike.
struct HeadWork {
  int64_t heads;
  std::vector<int64_t> blocks;  // of queries, that its tiles see, from the first keys on
};

// What all tiles do.
struct BackwardWork {
  std::vector<HeadWork> heads;
  int64_t tiles = 0, blocks = 0;        // in all
  int64_t least = INT64_MAX, most = 0;  // blocks of a tile

  BackwardWork(const BackwardParams& params, int block_m, int block_n) {
    for (const KnownSequences& sequences : known_sequences(params)) {
      HeadWork work{sequences.count() * params.nheads_kv, {}};
      for (int64_t key = 0; key < sequences.keys(); key += block_n) {
        const int64_t seen = sequences.query_steps(key, key + block_n, block_m);
        work.blocks.push_back(seen);
        tiles += work.heads, blocks += work.heads * seen;
        least = std::min(least, seen), most = std::max(most, seen);
      }
      heads.push_back(work);
    }
  }

  // How much tiles that run together differ in length, `span` of each head: from 0, if all are
  // equally long, to 1, if they get shorter down to nothing. The mean over all steps.
  float uneven(int64_t span) const {
    float sum = 0;
    const std::vector<int64_t>& lengths = heads.front().blocks;
    for (auto first = lengths.begin(); first != lengths.end();) {
      const auto last = first + std::min<int64_t>(span, lengths.end() - first);
      const float steps = std::accumulate(first, last, 0.f);
      const float longest = *std::max_element(first, last) * static_cast<float>(last - first);
      if (steps > 0) sum += steps * 2 * (1 - steps / longest);
      first = last;
    }
    return sum / std::accumulate(lengths.begin(), lengths.end(), 1e-6f);
  }
};

// A division of all tiles into parts.
struct Division {
  int group;   // query heads
  int splits;  // parts
  bool ordered;

  // Of the longest part of a tile. In order, a part has whole heads, and waits at each further one
  // for the longest tile.
  int64_t steps(int64_t blocks, int64_t most) const {
    if (!ordered || splits > group) return (blocks * group + splits - 1) / splits;
    return blocks + most * ((group - 1) / splits);
  }
  // How many heads the parts of one head read at a time. Tiles of different lengths are soon at
  // different heads; uneven: 0 if all are equally long, to 1
  float heads_at_a_time(float uneven) const {
    const float heads = static_cast<float>(group) / splits;
    return heads < 1 ? heads : 1 + (heads - 1) * uneven;
  }
};

// Microseconds, with parts in the scheduler's order.
// section: parts of heads whose tiles are handed out together
float predicted_time(const BackwardWork& work, const PartTimes& times, const Division& division,
                     int64_t section, int workers) {
  const int splits = division.splits;
  const float ends = times.ends + (splits > 1 ? times.leave : 0);
  const float sums = splits > 1 ? times.sums(work.tiles * splits, splits) : 0;
  const auto time = [&](int64_t blocks) {
    return ends + division.steps(blocks, work.most) * times.step;
  };
  const int64_t count = work.tiles * splits;
  if (work.least == work.most) {
    return sums + (count + workers - 1) / workers * time(work.most);
  }
  if (count > int64_t{kManyPieces} * workers) {
    const float each = time(work.blocks / work.tiles);
    return sums + count * each / workers + each / 2;
  }
  std::vector<Work> parts;
  for (const HeadWork& x : work.heads) {
    for (int64_t left = x.heads * splits, some; left > 0; left -= some) {
      // The last section is a whole one.
      some = left > section ? std::min(section, left - section) : left;
      for (const int64_t blocks : x.blocks) parts.push_back({some, time(blocks)});
    }
  }
  return sums + makespan(parts, workers);
}

// What the heads that share K and V have in one of these sequences.
struct WholeHead {
  int64_t blocks, row_tiles, steps = 0;

  WholeHead(const KnownSequences& sequences, const BackwardParams& params, int block_m,
            int block_n) {
    const int64_t group = params.nheads / params.nheads_kv;
    blocks = (sequences.keys() + block_n - 1) / block_n;
    row_tiles = group * ((sequences.queries() + block_m - 1) / block_m);
    for (int64_t key = 0; key < sequences.keys(); key += block_n) {
      steps += group * sequences.query_steps(key, key + block_n, block_m);
    }
  }
};

struct TimedPlan {
  BackwardPlan plan;
  float time;
};

// When all workers have had equally many tiles, those left over keep some busy while the others
// wait. If all tiles are equally long, these alone may be divided.
// best: undivided; steps: of a tile; factor: of all times
TimedPlan divide_leftover(TimedPlan best, const PartTimes& times, int64_t tiles, int64_t steps,
                          int workers, float factor) {
  const int64_t leftover = tiles % workers;
  const float whole = tiles / workers * (times.ends + steps * times.step);
  for (int splits = 2; splits <= kMostSplits && kLeastSteps * splits <= steps; ++splits) {
    const int64_t parts = leftover * splits, rounds = (parts + workers - 1) / workers;
    if (rounds > kMostRounds) break;
    const float part = times.ends + times.leave + (steps + splits - 1) / splits * times.step;
    const float time = factor * (whole + rounds * part + times.sums(parts, splits));
    if (time >= best.time) continue;
    best = {{splits, best.plan.section, static_cast<int>(tiles - leftover)}, time};
  }
  return best;
}

// All tiles of dense sequences in parts of so many steps, or fewer.
// factor: of all times
TimedPlan divide_unequally(const BackwardWork& work, const PartTimes& times, int group,
                           int64_t steps, int workers, float factor) {
  const HeadWork& head = work.heads.front();
  UnequalParts unequal{};
  std::vector<Work> all;
  int64_t divided = 0, most = 0;  // parts: of divided tiles, of a tile
  for (const int64_t blocks : head.blocks) {
    const int64_t parts = std::max<int64_t>((blocks * group + steps - 1) / steps, 1);
    unequal.first[unequal.blocks + 1] = unequal.first[unequal.blocks] + static_cast<int>(parts);
    ++unequal.blocks;
    const int64_t longest = (blocks * group + parts - 1) / parts;
    const float leave = parts > 1 ? times.leave : 0;
    all.push_back({head.heads * parts, times.ends + leave + longest * times.step});
    if (parts > 1) divided += parts;
    most = std::max(most, parts);
  }
  const float sums = times.sums(head.heads * divided, most);
  const BackwardPlan plan{1, static_cast<int>(head.heads), 0, unequal};
  return {plan, factor * (sums + makespan(all, workers))};
}

}  // namespace

BackwardPlan plan_backward(const BackwardParams& params, int block_m, int block_n, int workers,
                           int headdim, int headdim_v) {
  const int64_t heads = int64_t{params.batch} * params.nheads_kv;
  const int64_t blocks = (params.seqlen_k + block_n - 1) / block_n, tiles = heads * blocks;
  TimedPlan best{{1, static_cast<int>(heads), static_cast<int>(tiles)}, INFINITY};
  // Without a worker (a part of a GPU may have no room for a cluster) the launch will say so.
  if (tiles == 0 || workers == 0) return best.plan;

  const PartTimes times = part_times(block_m, block_n, headdim, headdim_v);
  const BackwardWork work(params, block_m, block_n);
  // Q, dO and dQ of one query head, as far as a tile sees them.
  const int64_t rows = std::min<int64_t>(params.seqlen_q, work.most * block_m);
  const float head_bytes = 1.f * rows * (2 * (params.headdim + params.headdim_v) + 4 * headdim);
  const int group = params.nheads / params.nheads_kv;
  const bool packed = params.cu_seqlens_k != nullptr, ordered = params.deterministic;
  const int64_t part_bytes = int64_t{4} * block_n * (headdim + headdim_v);
  const int64_t dq_bytes = int64_t{4} * params.row_tiles * params.nheads * block_m * headdim;
  // Heads that keep workers busy: some more if some tiles end early.
  const float early = work.least < work.most ? 0.25f : 0;
  const int64_t busy_heads = static_cast<int64_t>(std::ceil(0.9f * workers / blocks + early));
  const int64_t tiles_wanted = static_cast<int64_t>(std::ceil(kOrderedTiles * workers / blocks));
  const int64_t ordered_heads = std::max(tiles_wanted, kOrderedHeads) * (group == 1 ? 1 : 2);
  for (const int splits : kSplits) {
    if (splits > 1 && group * work.most < kLeastSteps * splits) break;
    const bool long_parts = group * work.most * block_m >= kOrderedQueries * splits;
    const int64_t most_bytes =
        ordered && long_parts ? dq_bytes : std::max(kPartsBytes, dq_bytes / 2);
    if (splits > 1 && tiles * splits * part_bytes > most_bytes) break;
    const Division division{group, splits, ordered};
    // Sections are all heads, a half of them, a quarter, as long as one keeps workers busy.
    // In order, parts of one query head stay together: they wait for each other. Packed sequences
    // have no sections.
    const int64_t all = heads * splits;
    const int64_t unit = packed ? all : ordered && splits > group ? splits : 1;
    const int64_t least_section = std::min(all, ordered ? ordered_heads : busy_heads);
    float factor = 1;
    for (int64_t section = all; section >= least_section; section = section / 2 / unit * unit) {
      if (!packed) {
        const int64_t together = std::min<int64_t>(section, workers);
        const float uneven = work.uneven((workers + together - 1) / together);
        factor = cache_factor(together * head_bytes * division.heads_at_a_time(uneven));
      }
      const float time =
          factor * predicted_time(work, times, division,
                                  packed ? params.nheads_kv * splits : section, workers);
      if (time > best.time) continue;
      best = {{splits, static_cast<int>(section), splits == 1 ? static_cast<int>(tiles) : 0}, time};
    }
    if (splits == 1 && !packed && !ordered && work.least == work.most) {
      best = divide_leftover(best, times, tiles, work.most * group, workers, factor);
    }
  }
  if (!packed && !ordered && blocks <= kMostUnequalBlocks && tiles <= kUnequalTiles * workers) {
    const float factor = cache_factor(std::min<int64_t>(heads, workers) * head_bytes * group);
    const float even = 1.f * work.blocks * group / workers;
    for (float relative = 0.95f; relative < 2; relative *= 1.06f) {
      const auto steps = std::max<int64_t>(std::ceil(even * relative), kLeastSteps);
      if (work.most * group > kMostUnequalParts * steps) continue;
      const TimedPlan plan = divide_unequally(work, times, group, steps, workers, factor);
      const int64_t parts = plan.plan.unequal.first[blocks];
      if (parts > blocks && heads * parts * part_bytes <= std::max(kPartsBytes, dq_bytes / 2) &&
          plan.time < best.time) {
        best = plan;
      }
    }
  }
  return best.plan;
}

bool is_masked(const BackwardParams& params) {
  return bounded_window(params.window_left, params.seqlen_k) < params.seqlen_k ||
         bounded_window(params.window_right, params.seqlen_q) < params.seqlen_q;
}

bool takes_long_steps(const BackwardParams& params) {
  return !is_masked(params) && params.seqlen_q >= kLongQueries && params.seqlen_k >= kLongKeys;
}

// Heads of a section are done together: the rows kernel clears the workspace of the first section,
// idle warps that of the next.
IdleWork plan_idle_work(const BackwardParams& params, const BackwardPlan& plan, int64_t head_steps,
                        int block_m, int block_n, int workers) {
  const int64_t heads = int64_t{params.batch} * params.nheads_kv;
  const int64_t blocks = (params.seqlen_k + block_n - 1) / block_n;
  const int64_t group = params.nheads / params.nheads_kv;
  const int64_t head_tiles = group * ((params.seqlen_q + block_m - 1) / block_m);
  const float additions = group == 1 ? kAdditionsToIdle : kAdditionsOfGroupsToIdle;
  if (blocks * heads < int64_t{kTilesToIdle} * workers || head_steps < additions * head_tiles) {
    return {};
  }
  const int parts = plan.whole == 0 ? plan.splits : 1;
  const int64_t section =
      std::max<int64_t>((plan.section + parts - 1) / parts, (workers + blocks - 1) / blocks);
  const int64_t tiles = head_tiles * heads, ahead = 2 * section * head_tiles;
  if (head_steps > INT_MAX || tiles + ahead > INT_MAX) return {};
  return {static_cast<int>(head_steps), static_cast<int>(head_tiles), static_cast<int>(tiles),
          static_cast<int>(std::min(tiles, section * head_tiles)), static_cast<int>(ahead)};
}

bool takes_whole_heads(const BackwardParams& params, int block_m, int block_n, int workers,
                       int headdim, int headdim_v) {
  const PartTimes times = part_times(block_m, block_n, headdim, headdim_v);
  const WholeHead longest({params, 1, params.seqlen_q, params.seqlen_k}, params, block_m, block_n);
  const int64_t heads = int64_t{params.batch} * params.nheads_kv;
  if (heads == 0 || workers == 0 || longest.blocks < 2 || longest.row_tiles > kMostHeadTiles) {
    return false;
  }
  int64_t known = 0, row_tiles = 0, steps = 0;
  float time = 0, at_work = 0;  // at_work: row tiles, a step
  for (const KnownSequences& sequences : known_sequences(params)) {
    const WholeHead head(sequences, params, block_m, block_n);
    const int64_t count = sequences.count();
    known += count, row_tiles += count * head.row_tiles, steps += count * head.steps;
    time += count * (head.blocks * times.ends + head.steps * times.step);
    at_work += 1.f * count * head.steps * head.row_tiles;
  }
  if (steps == 0) return false;
  // Q, dO and dQ of the heads at work.
  const float bytes =
      workers * at_work / steps * block_m * (2 * (headdim + headdim_v) + 4 * headdim);
  const bool seldom = steps <= kHeadsAdditions * row_tiles;
  if (steps == known * longest.steps) {
    const int64_t rounds = (heads + workers - 1) / workers;
    const float busy = static_cast<float>(heads) / (rounds * workers);
    return busy >= kBusyHeads + kBusyBlocks * longest.blocks &&
           (longest.blocks == 2 || bytes <= kHeadsBytes || seldom);
  }
  const float mean = time / known * heads / workers;
  const float last = longest.blocks * times.ends + longest.steps * times.step;
  return mean >= kBusyUnequalHeads * (mean + last / 2) && longest.blocks <= kUnequalBlocks &&
         (longest.blocks == 2 || bytes <= kUnequalHeadsBytes ||
          (seldom && params.nheads == params.nheads_kv));
}

}  // namespace flash::sm90
