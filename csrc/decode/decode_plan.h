// Into how many parts the decode kernel divides the keys of a tile: what is predicted to take the
// least time, from shapes alone. Host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host/known_sequences.h"
#include "params.h"

namespace flash::decode {

struct DecodePlan {
  int splits;    // parts of a tile's keys at most
  int cluster;   // thread blocks of a cluster; a power of two
  int clusters;  // of a tile

  DecodePlan(int splits, int cluster)
      : splits(splits), cluster(cluster), clusters((splits + cluster - 1) / cluster) {}
};

// With so many parts, whatever the launch: as few clusters as can be.
inline DecodePlan plan_of_splits(int splits, int most_cluster) {
  int cluster = 1;
  while (cluster < splits && cluster < most_cluster) cluster *= 2;
  return {splits, cluster};
}

// What a launch has to do, without regard to parts.
struct DecodeWork {
  int64_t tiles;
  int rows;               // of a tile
  float rows_of_threads;  // that a thread block merges at a time
  int step_keys;          // of a thread block
  int64_t step_bytes;     // of K and V
  int most_splits, most_cluster;
};

// slots_of(cluster, alone): thread blocks that run at a time, each alone on its SM or not
template <typename SlotsOf>
DecodePlan plan_decode(const ForwardParams& params, const DecodeWork& work, SlotsOf slots_of) {
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), work.step_keys));
  }
  const int most_splits = static_cast<int>(std::min<int64_t>(steps, work.most_splits));
  if (params.num_splits > 0) {
    return plan_of_splits(std::min(params.num_splits, most_splits), work.most_cluster);
  }

  // Fitted to an H200: 1 to 256 tiles of 1 to 32 rows, 512 to 64k keys. Microseconds; bytes of a
  // microsecond, of all SMs and of one, which computes more for many rows and gathers small pages.
  constexpr float kEnds = 3.5f, kBytes = 4.49e6f;
  constexpr float kFewRows = 55e3f, kManyRows = 37e3f, kManyRowsByTwos = 49e3f, kSmallPages = 0.7f;
  // To merge a cluster and several of them, each once and for 8 parts of a thread's columns.
  constexpr float kCluster = 0.6f, kClusterParts = 0.34f, kClusters = 1.36f, kClustersParts = 0.85f;
  const bool small_pages = params.block_table != nullptr && params.page_size < work.step_keys;
  DecodePlan best{1, 1};
  float least = INFINITY;
  for (int cluster = 1; cluster <= work.most_cluster; cluster *= 2) {
    const int64_t slots = slots_of(cluster, false), alone = slots_of(cluster, true);
    // Clusters that have no SM for each thread block fill SMs by twos.
    const auto round = [&](int64_t blocks, int64_t block_steps) {
      if (blocks == 0) return 0.f;
      const bool by_twos = cluster > 1 && blocks > alone;
      const int64_t sms = std::min(by_twos ? (blocks + 1) / 2 : blocks, alone);
      const float bytes_of_sm = (work.rows <= 16 ? kFewRows
                                 : by_twos       ? kManyRowsByTwos
                                                 : kManyRows) *
                                (small_pages ? kSmallPages : 1);
      return kEnds + static_cast<float>(block_steps * work.step_bytes * blocks) /
                         std::min(kBytes, static_cast<float>(sms) * bytes_of_sm);
    };
    const float turns = std::ceil(std::ceil(1.f * work.rows / cluster) / work.rows_of_threads);
    for (int splits = cluster; splits <= most_splits; splits += cluster) {
      const DecodePlan plan{splits, cluster};
      const int64_t blocks = work.tiles * splits, block_steps = (steps + splits - 1) / splits;
      float time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                   round(blocks % slots, block_steps);
      const auto merge = [&](int parts, float once, float each) {
        if (parts > 1) time += once + each * turns * static_cast<float>((parts + 7) / 8);
      };
      merge(cluster, kCluster, kClusterParts);
      merge(plan.clusters, kClusters, kClustersParts);
      if (time < least) {
        least = time;
        best = plan;
      }
    }
  }
  return best;
}

}  // namespace flash::decode
