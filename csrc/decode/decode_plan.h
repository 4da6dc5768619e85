// Into how many parts the decode kernel divides the keys of a tile: what is predicted to take the
// least time, from shapes alone. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "decode/decode_config.cuh"
#include "host/known_sequences.h"
#include "params.h"

namespace flash::decode {

struct DecodePlan {
  int warps;     // of a thread block
  int splits;    // parts of a tile's keys at most
  int cluster;   // thread blocks of a cluster; a power of two
  int clusters;  // of a tile
  float time = INFINITY;

  DecodePlan(int warps, int splits, int cluster)
      : warps(warps),
        splits(splits),
        cluster(cluster),
        clusters((splits + cluster - 1) / cluster) {}
};

// With so many parts, whatever the launch: as few clusters as can be.
inline DecodePlan plan_of_splits(int warps, int splits, int most_cluster) {
  int cluster = 1;
  while (cluster < splits && cluster < most_cluster) cluster *= 2;
  return {warps, splits, cluster};
}

// What a launch has to do, without regard to parts.
struct DecodeWork {
  int row_tiles;  // of a key head, which read the same keys
  int64_t tiles;
  int rows;               // of a tile
  int warps;              // of a thread block
  float rows_of_threads;  // that it merges at a time
  int block_keys;         // of a step of a warp
  int64_t key_bytes;      // of a key and its value
  int most_splits, most_cluster;
  int sms;
};

// slots_of(cluster, alone): thread blocks that run at a time, each alone on its SM or not
template <typename SlotsOf>
DecodePlan plan_decode(const ForwardParams& params, const DecodeWork& work, SlotsOf slots_of) {
  const int step_keys = work.warps * work.block_keys;
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), step_keys));
  }
  const int most_splits = static_cast<int>(std::min<int64_t>(steps, work.most_splits));
  if (params.num_splits > 0) {
    return plan_of_splits(work.warps, std::min(params.num_splits, most_splits), work.most_cluster);
  }

  // Fitted to an H200: 1 to 512 tiles of 1 to 32 rows, 512 to 64k keys. Microseconds; bytes of a
  // microsecond from memory, and of an SM by how its warps come.
  constexpr float kEnds = 3.3f, kBytes = 4.2e6f;
  constexpr float kOfFewWarps = 53e3f, kOfManyWarps = 64e3f, kOfFewByTwos = 42e3f;
  // To merge what the warps have, for each turn of the threads; a cluster and several of them, each
  // once and for 8 parts of a thread's columns.
  constexpr float kFewWarpsTurn = 0.22f, kManyWarpsTurn = 0.65f;
  constexpr float kCluster = 0.53f, kClusterParts = 0.3f, kClusters = 1.f, kClustersParts = 0.63f;
  const bool few_warps = work.warps == kFewWarps;
  const auto turns = [&](int rows) {
    return std::ceil(static_cast<float>(rows) / work.rows_of_threads);
  };
  DecodePlan best{work.warps, 1, 1};
  for (int cluster = 1; cluster <= work.most_cluster; cluster *= 2) {
    const int64_t slots = slots_of(cluster, false);
    const int64_t alone = cluster > 1 ? slots_of(cluster, true) : work.sms;
    // Thread blocks of few warps that have no SM each fill SMs by twos.
    const auto round = [&](int64_t blocks, int64_t block_steps) {
      if (blocks == 0) return 0.f;
      const bool by_twos = few_warps && blocks > alone;
      const int64_t sms = std::min<int64_t>(by_twos ? (blocks + 1) / 2 : blocks, work.sms);
      const float bytes_of_sm = by_twos ? kOfFewByTwos : few_warps ? kOfFewWarps : kOfManyWarps;
      // Tiles of the same key head read their keys from memory once.
      return kEnds + static_cast<float>(block_steps * step_keys * work.key_bytes * blocks) /
                         std::min(kBytes * static_cast<float>(work.row_tiles),
                                  static_cast<float>(sms) * bytes_of_sm);
    };
    const float slice_turns = turns((work.rows + cluster - 1) / cluster);
    for (int splits = cluster; splits < most_splits + cluster; splits += cluster) {
      const int64_t block_steps = (steps + splits - 1) / splits;
      const int64_t used = (steps + block_steps - 1) / block_steps;
      if (used <= splits - cluster) continue;  // fewer parts do the same
      DecodePlan plan{work.warps, splits, cluster};
      const int64_t blocks = work.tiles * splits;
      plan.time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                  round(blocks % slots, block_steps) +
                  turns(work.rows) * (few_warps ? kFewWarpsTurn : kManyWarpsTurn);
      const auto merge = [&](int parts, float once, float each) {
        if (parts > 1) plan.time += once + each * slice_turns * static_cast<float>((parts + 7) / 8);
      };
      merge(cluster, kCluster, kClusterParts);
      merge(plan.clusters, kClusters, kClustersParts);
      if (plan.time < best.time) best = plan;
    }
  }
  return best;
}

}  // namespace flash::decode
