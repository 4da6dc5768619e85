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
  int splits;             // parts of a tile's keys at most
  int cluster;            // thread blocks of a cluster
  int clusters;           // of a tile
  float time = INFINITY;  // microseconds

  DecodePlan(int splits, int cluster)
      : splits(splits), cluster(cluster), clusters((splits + cluster - 1) / cluster) {}
};

// What a launch has to do, without regard to parts.
struct DecodeWork {
  int64_t tiles;
  int same_keys;          // tiles that read the same keys
  bool is_e4m3;           // of the kernel
  int tile_rows;          // of the kernel: 16, 32, or 64 by WGMMA
  int rows;               // of a tile
  float rows_of_threads;  // that a thread block merges at a time
  int step_keys;          // of a thread block
  int64_t step_bytes;     // of K and V
  int most_splits, most_cluster;
  int received_rows;  // that a thread block has place for, from all of a cluster; 0: no clusters
  bool counted;       // a tile can have several clusters, which count who is done
  int sms;

  // Whether the rows of a tile can be merged by so many.
  bool takes(int cluster) const {
    return cluster == 1 || (rows + cluster - 1) / cluster * cluster <= received_rows;
  }
};

// With so many parts, whatever the launch: as few clusters as can be. Clusters decide the order in
// which parts merge, so they do not depend on `most_splits`, of as many keys as a cache has room
// for.
inline DecodePlan plan_of_splits(const DecodeWork& work, int splits, int most_splits,
                                 int most_cluster) {
  splits = std::min(splits, work.counted ? work.most_splits : most_cluster);
  const int clusters = (splits + most_cluster - 1) / most_cluster;
  int cluster = (splits + clusters - 1) / clusters;
  while (!work.takes(cluster)) --cluster;
  if (!work.counted) splits = cluster;
  splits = std::min(splits, most_splits);
  if (splits < cluster && work.takes(splits)) cluster = splits;  // all parts are one cluster's
  return {splits, cluster};
}

// slots_of(cluster, alone): thread blocks that run at a time, each alone on its SM or not
template <typename SlotsOf>
DecodePlan plan_decode(const ForwardParams& params, const DecodeWork& work, SlotsOf slots_of) {
  int64_t steps = 1;
  for (const KnownSequences& x : known_sequences(params)) {
    steps = std::max(steps, x.steps(0, x.queries(), work.step_keys));
  }
  const int most_splits = static_cast<int>(std::min<int64_t>(steps, work.most_splits));
  // A part of a GPU may have no room for large clusters.
  int most_cluster = work.most_cluster;
  while (most_cluster > 1 && slots_of(most_cluster, false) == 0) --most_cluster;
  if (params.num_splits > 0) {
    return plan_of_splits(work, params.num_splits, most_splits, most_cluster);
  }

  // Fitted to an H200, behind a product of a matrix and a vector: 1 to 512 tiles, 1k to 64k keys.
  // Microseconds; bytes of a microsecond from memory, from the L2 cache, of an SM with one thread
  // block and with two, fewer of e4m3, which is widened. Memory is slower if some have two.
  constexpr float kBytes = 4.67e6f, kCacheBytes = 7.8e6f;
  constexpr float kByTwos = 0.96f;
  const bool narrow = work.tile_rows == 16, by_wgmma = work.tile_rows == 64;
  const float ends = narrow ? 4.f : by_wgmma ? 4.57f : 4.5f;
  const float bytes_of_one = work.is_e4m3 ? 29e3f : narrow ? 55.9e3f : by_wgmma ? 53.8e3f : 44.7e3f;
  const float bytes_of_two = work.is_e4m3 ? 40e3f : narrow ? 86.2e3f : 50e3f;
  // To merge, for each turn of the threads: what the thread block has, 8 parts of a cluster, and of
  // 8 clusters, which also takes some time once.
  const float own_turn = by_wgmma ? 0.2f : 0.21f, cluster_parts = by_wgmma ? 0.2f : 0.52f;
  const float clusters_parts = by_wgmma ? 1.65f : 1.02f, of_clusters = by_wgmma ? 0.28f : 0.98f;
  constexpr int kMostClusters = 16;  // that are tried
  const auto turns = [&](int rows) {
    return std::ceil(static_cast<float>(rows) / work.rows_of_threads);
  };
  DecodePlan best{1, 1};
  for (int cluster = 1; cluster <= most_cluster; ++cluster) {
    const int64_t slots = slots_of(cluster, false);
    if (slots == 0 || !work.takes(cluster)) continue;
    const int64_t alone = cluster > 1 ? slots_of(cluster, true) : work.sms;
    const auto round = [&](int64_t blocks, int64_t block_steps) {
      if (blocks == 0) return 0.f;
      const float twos = std::max<int64_t>(blocks - alone, 0);  // SMs with two thread blocks
      const float ones = std::min(blocks, alone) - twos;
      const float block_bytes = static_cast<float>(block_steps * work.step_bytes);
      // Tiles of the same keys read them from memory once.
      const float most = std::min(kBytes * work.same_keys, kCacheBytes) * (twos > 0 ? kByTwos : 1);
      // What part of their speed SMs have that want so many bytes together: near the memory's they
      // hinder each other.
      const auto share = [most](float wanted) {
        float x = wanted / most;
        x *= x, x *= x, x *= x;
        return 1 / std::sqrt(std::sqrt(std::sqrt(1 + x)));
      };
      // SMs with one are done first, then the others have the memory for themselves.
      const float shared = share(ones * bytes_of_one + twos * bytes_of_two);
      const float first = ones > 0 ? block_bytes / (bytes_of_one * shared) : 0.f;
      if (twos == 0) return ends + first;
      const float left = 2 * block_bytes - bytes_of_two * shared * first;
      return ends + first + left / (bytes_of_two * share(twos * bytes_of_two));
    };
    const float slice_turns = turns((work.rows + cluster - 1) / cluster);
    const int most = !work.counted       ? cluster
                     : most_cluster == 1 ? most_splits
                                         : std::min(most_splits, kMostClusters * cluster);
    for (int splits = cluster; splits < most + cluster; splits += cluster) {
      const int64_t block_steps = (steps + splits - 1) / splits;
      if ((steps + block_steps - 1) / block_steps <= splits - cluster) continue;  // fewer do it
      DecodePlan plan{splits, cluster};
      const int64_t blocks = work.tiles * splits;
      const auto merging = [&](int parts, float each) {
        return parts > 1 ? each * slice_turns * static_cast<float>((parts + 7) / 8) : 0.f;
      };
      plan.time = static_cast<float>(blocks / slots) * round(slots, block_steps) +
                  round(blocks % slots, block_steps) + turns(work.rows) * own_turn +
                  merging(cluster, cluster_parts) + (plan.clusters > 1 ? of_clusters : 0.f) +
                  merging(plan.clusters, clusters_parts);
      if (plan.time < best.time) best = plan;
    }
  }
  return best;
}

}  // namespace flash::decode
