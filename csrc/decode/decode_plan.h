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

// tiles: of the launch; step_keys, step_bytes: of K and V in a step of a thread block; part_bytes:
// that a cluster leaves for the merge; slots_of(cluster, alone): thread blocks that run at a time,
// each alone on its SM or not
template <typename SlotsOf>
DecodePlan plan_decode(const ForwardParams& params, int64_t tiles, int step_keys,
                       int64_t step_bytes, int64_t part_bytes, int most_splits, int most_cluster,
                       SlotsOf slots_of) {
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), step_keys));
  }
  most_splits = static_cast<int>(std::min<int64_t>(steps, most_splits));
  if (params.num_splits > 0) {
    return plan_of_splits(std::min(params.num_splits, most_splits), most_cluster);
  }

  // Fitted to an H200: 1 to 2048 tiles, 1k to 64k keys. Microseconds; bytes of a microsecond, of
  // all SMs, of one SM, and of a thread block that merges. Clusters that have no SM for each thread
  // block fill SMs by twos, which takes kPacked longer.
  constexpr float kEnds = 3.2f, kClusterMerge = 0.5f, kMerge = 2.3f, kPacked = 1.5f;
  constexpr float kBytes = 4.58e6f, kBytesOfSm = 56.5e3f, kBytesOfOne = 75e3f;
  DecodePlan best{1, 1};
  float least = INFINITY;
  for (int cluster = 1; cluster <= most_cluster; cluster *= 2) {
    const int64_t slots = slots_of(cluster, false), alone = slots_of(cluster, true);
    const auto round = [&](int64_t blocks, int64_t block_steps) {
      if (blocks == 0) return 0.f;
      const bool packed = cluster > 1 && blocks > alone;
      const float sms = std::min(packed ? (blocks + 1) / 2 : blocks, alone);
      const float bytes = static_cast<float>(block_steps * step_bytes) * blocks;
      return kEnds + (packed ? kPacked : 0) + bytes / std::min(kBytes, sms * kBytesOfSm);
    };
    for (int splits = cluster; splits <= most_splits; splits += cluster) {
      const DecodePlan plan{splits, cluster};
      const int64_t blocks = tiles * splits, block_steps = (steps + splits - 1) / splits;
      float time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                   round(blocks % slots, block_steps);
      if (cluster > 1) time += kClusterMerge;
      if (plan.clusters > 1) {
        time += kMerge + static_cast<float>(plan.clusters * part_bytes / cluster) / kBytesOfOne;
      }
      if (time < least) {
        least = time;
        best = plan;
      }
    }
  }
  return best;
}

}  // namespace flash::decode
