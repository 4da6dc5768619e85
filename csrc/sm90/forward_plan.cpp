#include "sm90/forward_plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/divided_keys.h"
#include "host/known_sequences.h"
#include "host/launch.h"
#include "host/makespan.h"
#include "sm90/forward_tile.h"

namespace flash::sm90 {
namespace {

constexpr int kLeastSteps = 2;  // over the keys of a part
// Of a sequence about so many blocks of queries are told apart; neighbours of more are taken to be
// alike, so that a plan takes little time.
constexpr int64_t kMostBlocks = 1024;
// Tickets are ints, and workers draw some beyond the last.
constexpr int64_t kMostTickets = 1 << 30;
// Tiles are about equally long if the shortest has so much of the steps of the longest.
constexpr float kAlike = 0.9f;
// What a launch of parts of the tiles left over costs: microseconds, and a part of the time of the
// other tiles, which SMs do not end at once.
constexpr float kSecondLaunch = 8.f, kUneven = 0.02f;

// Several rounds of parts that are no clusters take so many times as long.
constexpr float kSeveralRounds = 1.03f;

// A figure for a GPU with a few tiles, and for one that has a tile for each SM or more: memory is
// busier then, and clocks are lower.
struct ByLoad {
  float idle, busy;
  float at(float load) const { return idle + (busy - idle) * load; }
};

// Microseconds on an H200, fitted to what benchmarks/tiles.py measured.
struct TileTimes {
  ByLoad ends;        // what comes before and after the steps of a tile
  ByLoad step;        // over a block of keys
  float shared_step;  // the same, if two streams share an SM
};

// Of a head dim, whatever the tile shape.
struct HeadDimTimes {
  float unused;             // part of a step that is saved if no warpgroup has queries
  float skipped;            // part of a step that is saved if no warpgroup sees the block of keys
  float merge, merge_part;  // microseconds, of the merging of a tile's parts: once, and for each
};

TileTimes tile_times(int headdim, int headdim_v, const ForwardTile& tile) {
  const bool wide = tile.block_m == 192;
  switch (headdim) {
    case 64:
      if (tile.streams == 2) return {{0.73f, 2.94f}, {0.55f, 0.57f}, 0.83f};
      return wide ? TileTimes{{1.85f, 3.39f}, {1.20f, 1.20f}, 0}
                  : TileTimes{{1.66f, 2.33f}, {0.97f, 1.11f}, 0};
    case 96:
      if (tile.streams == 2) return {{0.66f, 2.49f}, {0.56f, 0.58f}, 1.07f};
      return wide ? TileTimes{{1.81f, 3.93f}, {1.20f, 1.20f}, 0}
                  : TileTimes{{1.20f, 2.11f}, {0.95f, 0.95f}, 0};
    case 128:
      return wide ? TileTimes{{1.77f, 3.19f}, {0.97f, 0.97f}, 0}
                  : TileTimes{{1.56f, 2.57f}, {1.36f, 1.40f}, 0};
    case 192:
      if (headdim_v == 128) {
        return tile.block_n == 64 ? TileTimes{{0.99f, 1.78f}, {0.66f, 1.02f}, 0}
                                  : TileTimes{{1.72f, 2.26f}, {1.65f, 1.65f}, 0};
      }
      return tile.block_n == 64 ? TileTimes{{1.76f, 3.57f}, {0.88f, 1.04f}, 0}
                                : TileTimes{{1.86f, 5.20f}, {1.34f, 1.34f}, 0};
    default:
      return {{1.74f, 4.61f}, {1.19f, 1.19f}, 0};
  }
}

HeadDimTimes headdim_times(int headdim, int headdim_v) {
  switch (headdim) {
    case 64:
      return {0.32f, 0.29f, 2.f, 0.1f};
    case 96:
      return {0.48f, 0.43f, 3.f, 0.13f};
    case 128:
      return {0.70f, 0.82f, 3.9f, 0.17f};
    case 192:
      return headdim_v == 128 ? HeadDimTimes{0.02f, 0.03f, 3.9f, 0.17f}
                              : HeadDimTimes{0.56f, 0.03f, 5.f, 0.2f};
    default:
      return {0.54f, 0.56f, 6.3f, 0.2f};
  }
}

// The same of operands in 8 bits: of a step over 128 queries and 64 keys. Idle is a GPU that has a
// tile for each SM at most.
constexpr float kQuantisedEnds = 3.f;
ByLoad quantised_step(int headdim) {
  switch (headdim) {
    case 64:
      return {0.32f, 0.45f};
    case 96:
      return {0.4f, 0.56f};
    case 128:
      return {0.45f, 0.6f};
    case 192:
      return {0.65f, 0.82f};
    default:
      return {0.8f, 0.97f};
  }
}

// Of values in e4m3: microseconds of the pass that transposes them, and bytes that it reads and
// writes in one. Or the part of a step that it takes longer if it transposes its block of values.
constexpr float kTransposePass = 2.f, kTransposedBytes = 4e6f;
constexpr ByLoad transposed_steps(int headdim_v) {
  return headdim_v > 128 ? ByLoad{0.16f, 0.09f} : ByLoad{0.1f, 0.07f};
}

// Tiles alike: a block of queries with the keys that it sees, of all heads of sequences alike.
struct TileWork {
  int64_t count;
  int steps;         // over blocks of keys
  float seen_steps;  // of these, what a warpgroup that has queries sees in the mean
  float used;        // share of the warpgroups that have queries
};

// What a launch has to do; of a sequence the last blocks of queries come first.
std::vector<TileWork> forward_work(const ForwardParams& params, int group,
                                   const ForwardTile& tile) {
  const int rows = tile.block_m / group, warpgroups = tile.block_m / 64;
  std::vector<TileWork> tiles;
  for (const KnownSequences& sequences : known_sequences(params)) {
    const int64_t queries = sequences.queries(), heads = params.nheads / group;
    const int64_t blocks = (queries - 1) / rows + 1, alike = (blocks - 1) / kMostBlocks + 1;
    for (int64_t block = blocks - 1; block >= 0; block -= alike) {
      const int64_t first = block * rows;
      int64_t seen = 0;
      int used = 0;
      for (int i = 0; i < warpgroups && first + i * 64 / group < queries; ++i, ++used) {
        seen += sequences.steps(first, first + (i * 64 + 63) / group + 1, tile.block_n);
      }
      tiles.push_back({sequences.count() * heads * std::min(alike, block + 1),
                       static_cast<int>(sequences.steps(first, first + rows, tile.block_n)),
                       static_cast<float>(seen) / used, static_cast<float>(used) / warpgroups});
    }
  }
  return tiles;
}

// Microseconds, beside those of a launch that does nothing.
// sms: that work on tiles
float predicted_time(const std::vector<TileWork>& work, const TileTimes& times,
                     const HeadDimTimes& common, int streams, int splits, int sms) {
  int64_t tiles = 0;
  for (const TileWork& tile : work) tiles += tile.count * splits;
  const bool shared = streams == 2 && tiles > sms && splits == 1;
  const float load = std::min(1.f, static_cast<float>(tiles) / sms);
  const auto steps_of = [&](const TileWork& tile) {
    const float steps = (tile.steps + splits - 1) / splits, seen = tile.seen_steps / splits;
    return (steps - common.skipped * (steps - seen)) * (1 - common.unused * (1 - tile.used));
  };
  // If no stream takes a second tile, a long one has the SM to itself when its neighbour is done.
  float most_shared = INFINITY;
  if (shared && tiles <= 2 * sms) {
    most_shared = 0.f;
    for (const TileWork& tile : work) most_shared += steps_of(tile) * tile.count * splits / tiles;
  }
  std::vector<Work> pieces;
  pieces.reserve(work.size());
  for (const TileWork& tile : work) {
    const float steps = steps_of(tile);
    float time = times.ends.at(load) + steps * times.step.at(load);
    if (shared) time += std::min(steps, most_shared) * (times.shared_step - times.step.busy);
    if (splits > 1) time += common.merge + common.merge_part * splits;
    pieces.push_back({tile.count * splits, time});
  }
  return makespan(pieces, shared ? 2 * sms : sms);
}

int most_steps(const std::vector<TileWork>& work) {
  int most = 0;
  for (const TileWork& tile : work) most = std::max(most, tile.steps);
  return most;
}

// Whether parts have enough of the keys, and there are few enough of them. tiles: of the launch at
// most
bool may_divide(const std::vector<TileWork>& work, int64_t tiles, int splits) {
  return most_steps(work) >= kLeastSteps * splits && tiles * splits <= 2 * multiprocessors();
}

// A division of all tiles.
struct Division {
  int splits;
  bool apart;  // the parts of a tile are no cluster
  float time;  // microseconds
};

// The fastest one, or into as many parts as num_splits says (see kApart). Parts that are no
// clusters run on SMs that clusters would not reach too, and need not run at once.
// tiles: how many there are; tile_floats: of the output of one; fewest: parts
Division divide(const std::vector<TileWork>& work, const TileTimes& times,
                const HeadDimTimes& common, int streams, int64_t tiles, int64_t tile_floats,
                int num_splits, int fewest, SlotsOf slots_of) {
  const int sms = multiprocessors();
  const int given = std::clamp(num_splits, kApart - kMostApart, kMostSplits);
  const int given_apart = kApart - given;
  Division best{1, false, INFINITY};
  const auto consider = [&](int splits, bool apart, float time) {
    if (splits >= fewest && time < best.time) best = {splits, apart, time};
  };
  const auto consider_clusters = [&](int splits) {
    const int slots = std::max(slots_of(splits), given > 0 ? splits : 0);
    if (slots == 0) return;
    consider(splits, false, predicted_time(work, times, common, streams, splits, slots));
  };
  const auto consider_apart = [&](int splits) {
    const bool at_once = tiles * splits <= sms;
    HeadDimTimes merged_later = common;
    merged_later.merge = at_once ? 0.f : kLaterPart;
    merged_later.merge_part = 0.f;
    const float parts = predicted_time(work, times, merged_later, 1, splits, sms);
    consider(splits, true,
             (at_once ? 1.f : kSeveralRounds) * parts +
                 merge_time(splits, tiles * splits * tile_floats));
  };
  if (given_apart > 0) {
    consider_apart(given_apart);
  } else if (given != 0) {
    consider_clusters(std::max(given, 1));
  } else {
    consider_clusters(1);
    for (int splits = 2; splits <= kMostSplits; ++splits) {
      if (may_divide(work, tiles, splits)) consider_clusters(splits);
    }
    const int most = std::min(kMostApart, most_steps(work));
    for (int splits : likely_splits(tiles, sms, most)) consider_apart(splits);
  }
  return best;
}

// A division of the tiles left over alone, into parts that are no clusters.
struct Leftover {
  int splits;  // 1: none
  int whole;   // the other tiles
  float gain;  // microseconds
};

// What parts of the tiles left over gain, if all tiles are about equally long.
// tiles: how many there are; tile_floats: of the output of one
Leftover divide_leftover(const ForwardParams& params, const std::vector<TileWork>& work,
                         int64_t tiles, int64_t tile_floats, int streams, const TileTimes& times) {
  const int sms = multiprocessors();
  const int64_t whole = tiles / sms * sms, leftover = tiles - whole;
  Leftover best{1, 0, 0.f};
  if (params.num_splits > 0 || params.cu_seqlens_q != nullptr || streams > 1 || leftover == 0 ||
      whole == 0 || whole > INT_MAX) {
    return best;
  }
  int least = INT_MAX, most = 0;  // steps of a tile
  for (const TileWork& x : work) {
    least = std::min(least, x.steps);
    most = std::max(most, x.steps);
  }
  if (least < kAlike * most) return best;
  const float undivided = times.ends.busy + most * times.step.busy;
  const float overhead = kSecondLaunch + kUneven * undivided * (whole / sms);
  for (int splits = 2; splits <= kMostSplits; ++splits) {
    const bool given = -splits == params.num_splits;
    const bool many = leftover * splits > int64_t{kMostRounds} * sms;
    if (!given && (params.num_splits < 0 || many || most < kLeastSteps * splits)) continue;
    const int64_t rounds = (leftover * splits + sms - 1) / sms;
    const int steps = (most + splits - 1) / splits;
    const float part = times.ends.busy + steps * times.step.busy + kLaterPart;
    const float gain =
        undivided - rounds * part - overhead - merge_time(splits, leftover * splits * tile_floats);
    if (given || gain > best.gain) best = {splits, static_cast<int>(whole), gain};
  }
  return best;
}

// Of packed sequences at most.
int64_t count_tiles(const ForwardParams& params, int group, int block_m) {
  const int rows = block_m / group;
  return int64_t{params.batch} * (params.nheads / group) * ((params.seqlen_q + rows - 1) / rows);
}

// What there are more tickets of than a launch can count is refused.
void check_tickets(const ForwardParams& params, const ForwardPlan& plan, int group, int block_m) {
  const int rows = block_m / group, splits = plan.whole > 0 ? 1 : plan.splits;
  const int64_t blocks = params.cu_seqlens_q == nullptr
                             ? int64_t{params.batch} * ((params.seqlen_q + rows - 1) / rows)
                             : int64_t{params.total_q / rows} + params.batch;
  const int64_t tickets = blocks * (params.nheads / group) * splits;
  if (tickets > kMostTickets) {
    throw std::invalid_argument("batch * nheads * query blocks * num_splits: got " +
                                std::to_string(tickets) + "; accepted: up to 2^30");
  }
}

// Microseconds of the pass that transposes values of e4m3.
float transpose_pass_time(const ForwardParams& params, int headdim_v) {
  float keys = 0.f;
  for (const KnownSequences& x : known_sequences(params)) {
    keys += static_cast<float>(x.count()) * x.keys();
  }
  return kTransposePass + 2.f * keys * params.nheads_kv * headdim_v / kTransposedBytes;
}

}  // namespace

int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m) {
  const int group = params.nheads / params.nheads_kv;
  if (features == FeatureSet::kFull || group == 1 || group > block_m) return 1;
  const auto tiles = [&](int rows) { return (params.seqlen_q + rows - 1) / rows; };
  return tiles(block_m / group) < group * tiles(block_m) ? group : 1;
}

ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                         int headdim_v, SlotsOf slots_of) {
  const int tile_shapes = count_forward_tiles(headdim, headdim_v, features);
  const HeadDimTimes common = headdim_times(headdim, headdim_v);
  ForwardPlan best{0, 1, 0};
  float least = INFINITY;
  for (int choice = 0; choice < tile_shapes; ++choice) {
    if (params.tile >= 0 && choice != params.tile) continue;
    const ForwardTile tile = forward_tile(headdim, headdim_v, features, choice);
    const TileTimes times = tile_times(headdim, headdim_v, tile);
    const int group = heads_in_tile(params, features, tile.block_m);
    const int64_t tiles = count_tiles(params, group, tile.block_m);
    const std::vector<TileWork> work = forward_work(params, group, tile);
    const auto consider = [&](int splits, int whole, bool apart, float time) {
      if (time >= least) return;
      least = time;
      best = {choice, splits, whole, apart};
    };
    const int64_t tile_floats = int64_t{tile.block_m} * headdim_v;
    const Leftover leftover =
        divide_leftover(params, work, tiles, tile_floats, tile.streams, times);
    if (leftover.splits > 1) {
      const float whole = predicted_time(work, times, common, 1, 1, multiprocessors());
      consider(leftover.splits, leftover.whole, true, whole - leftover.gain);
      if (params.num_splits < 0) continue;
    }
    const Division all = divide(work, times, common, tile.streams, tiles, tile_floats,
                                params.num_splits, 1, slots_of);
    consider(all.splits, 0, all.apart, all.time);
  }
  const int block_m = forward_tile(headdim, headdim_v, features, best.tile).block_m;
  check_tickets(params, best, heads_in_tile(params, features, block_m), block_m);
  return best;
}

ForwardPlan plan_quantised(const ForwardParams& params, FeatureSet features, int headdim,
                           int headdim_v, const ForwardTile& tile, int transposed_keys,
                           SlotsOf slots_of) {
  const int group = heads_in_tile(params, features, tile.block_m);
  const HeadDimTimes common = headdim_times(headdim, headdim_v);
  const std::vector<TileWork> work = forward_work(params, group, tile);
  const int64_t tiles = count_tiles(params, group, tile.block_m);
  const ByLoad step = quantised_step(headdim);
  const float units = tile.block_m * tile.block_n / (128.f * 64);
  const auto times_of = [&](float step) {
    return TileTimes{{kQuantisedEnds, kQuantisedEnds}, {step * units, step * units}, 0};
  };
  const int64_t tile_floats = int64_t{tile.block_m} * headdim_v;
  const auto of_load = [&](const ByLoad& x) { return tiles > multiprocessors() ? x.busy : x.idle; };
  const auto divided = [&](float slower, int fewest) {
    return divide(work, times_of(of_load(step) * slower), common, 1, tiles, tile_floats,
                  params.num_splits, fewest, slots_of);
  };
  const bool may_transpose = transposed_keys > 0;
  const float pass = may_transpose ? transpose_pass_time(params, headdim_v) : 0.f;
  const Division all = divided(1.f, 1);
  ForwardPlan best{0, all.splits, 0, all.apart};
  float least = all.time + pass;
  const auto consider = [&](const ForwardPlan& plan, float time, bool given) {
    if (time >= least && !given) return;
    least = time;
    best = plan;
  };
  if (may_transpose && params.tile != 0) {
    const int fewest = params.seqlen_k > transposed_keys ? 2 : 1;
    const Division x = divided(1 + of_load(transposed_steps(headdim_v)), fewest);
    const bool given = params.tile == 1 && x.time < INFINITY;
    consider({1, x.splits, 0, x.apart}, x.time, given);
  }
  const TileTimes times = times_of(step.busy);
  const Leftover leftover = divide_leftover(params, work, tiles, tile_floats, tile.streams, times);
  if (leftover.splits > 1 && params.tile != 1) {
    const float whole = predicted_time(work, times, common, 1, 1, multiprocessors());
    consider({0, leftover.splits, leftover.whole, true}, whole + pass - leftover.gain,
             params.num_splits < 0);
  }
  check_tickets(params, best, group, tile.block_m);
  return best;
}

}  // namespace flash::sm90
