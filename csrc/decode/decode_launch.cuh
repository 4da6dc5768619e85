// Launches the decode kernel; sm80 and sm90 differ in the memory that its loads take, and in how it
// follows the kernel before.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "common/scores.h"
#include "decode/decode_config.cuh"
#include "decode/decode_kernel.cuh"
#include "decode/decode_plan.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"

namespace flash::decode {

using DecodeLauncher = std::function<void(const ForwardParams&, cudaStream_t)>;

// Thread blocks that run at a time, in clusters of a power of two.
// alone: each has an SM to itself
template <typename Config>
int slots_of(int warps, int cluster, bool alone) {
  constexpr auto kKernel = decode_kernel<Config>;
  const size_t shared_bytes = Config::shared_bytes(warps, alone);
  int log = 0;
  while (1 << log < cluster) ++log;
  static DeviceFacts known[2][2][8]{};
  DeviceFacts& facts = known[warps == kManyWarps][alone][log];
  if (cluster > 1) {
    return cluster * clusters_at_a_time(kKernel, dim3(1, cluster), 32 * warps, shared_bytes, facts);
  }
  const int blocks_per_sm = of_device(facts, [=](int) {
    int count;
    check_cuda(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kKernel, 32 * warps, shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return count;
  });
  return blocks_per_sm * multiprocessors();
}

// Completes the parameters; returns what launches with the addresses of any tensors of this layout.
template <typename Config>
DecodeLauncher prepare_kernel(ForwardParams& params, Workspaces& wanted) {
  constexpr auto kKernel = decode_kernel<Config>;
  constexpr int kMostWarps = Config::kHopper ? kManyWarps : kFewWarps;
  constexpr size_t kMostBytes = Config::shared_bytes(kMostWarps, true);
  // An SM has 228 KB on Hopper and keeps 1 KB for each thread block.
  static_assert(kMostBytes <= (Config::kHopper ? 227 : 99) * 1024);
  static_assert(!Config::kHopper || Config::shared_bytes(kFewWarps, false) <= 113 * 1024);
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, kMostBytes, devices);
  if constexpr (Config::kHopper) {
    static std::atomic<uint64_t> wide_devices{0};
    allow(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, wide_devices);
  }

  const int group = params.nheads / params.nheads_kv;
  const int64_t rows = int64_t{params.seqlen_q} * group;
  const int row_tiles = static_cast<int>((rows + Config::kRows - 1) / Config::kRows);
  const int heads = params.nheads_kv * row_tiles;  // of the grid
  // Where several clusters merge, each slice of a tile takes a counter.
  constexpr int kMostCluster = Config::kMostCluster;
  const bool counted = int64_t{heads} * kMostCluster <= kKeptZero;
  DecodeWork work{};
  work.row_tiles = row_tiles;
  work.tiles = int64_t{params.batch} * heads;
  work.rows = static_cast<int>(std::min<int64_t>(rows, Config::kRows));
  work.block_keys = Config::kBlockN;
  work.key_bytes = int64_t{params.headdim + params.headdim_v} * sizeof(typename Config::KV);
  work.most_splits = counted ? kMostSplits : kMostCluster;
  work.most_cluster = kMostCluster;
  work.sms = multiprocessors();
  const auto plan_of = [&](int warps) {
    work.warps = warps;
    work.rows_of_threads = 32 * warps / (Config::kHeadDimV / 4.f);
    return plan_decode(params, work, [warps](int cluster, bool alone) {
      return slots_of<Config>(warps, cluster, alone);
    });
  };
  // A fixed number of parts has few warps: other sequences of the batch must not decide in which
  // order a sequence is added up. And so do more tiles than SMs: two thread blocks on an SM hide
  // each other's ends.
  const bool forced = params.tile >= 0;
  const bool forced_many = params.tile >= count_row_tiles(Config::kHeadDimV);
  DecodePlan plan = plan_of(forced_many ? kMostWarps : kFewWarps);
  if (Config::kHopper && !forced && params.num_splits == 0 && work.tiles <= work.sms) {
    const DecodePlan with_many = plan_of(kManyWarps);
    if (with_many.time < plan.time) plan = with_many;
  }
  params.num_splits = plan.splits;
  // A larger append does not let this kernel start early.
  if (params.batch > kFewSequences) params.seqlen_new = 0;
  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);

  DecodeSchedule schedule{};
  schedule.splits = plan.splits;
  schedule.splits_reciprocal =
      plan.splits == 1 ? 0 : static_cast<unsigned>((int64_t{1} << 32) / plan.splits) + 1;
  schedule.cluster = plan.cluster;
  schedule.clusters = plan.clusters;
  schedule.group = group;
  schedule.row_tiles = row_tiles;
  schedule.rows = work.rows;
  schedule.warps = plan.warps;
  schedule.page_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (params.page_size == 1 << shift) schedule.page_shift = shift;
  }
  int most_batch = kMaxGrid;  // of a launch
  if (plan.clusters > 1) {
    most_batch = std::min(most_batch, kKeptZero / (heads * plan.cluster));
    const int64_t tiles = int64_t{heads} * std::min(params.batch, most_batch);
    const int64_t stored_rows = tiles * plan.clusters * schedule.rows;
    wanted.add("partial_out", params.partial_out, stored_rows * Config::kHeadDimV);
    wanted.add("partial_rows", params.partial_rows, stored_rows * 2);
    wanted.add_kept_zero("counters", params.counters);
  }
  // Clusters are packed onto few SMs if these have room.
  const int64_t blocks =
      int64_t{heads} * plan.cluster * plan.clusters * std::min(params.batch, most_batch);
  const bool alone = plan.cluster > 1 && blocks <= slots_of<Config>(plan.warps, plan.cluster, true);
  const size_t shared_bytes = Config::shared_bytes(plan.warps, alone);
  const int threads = 32 * plan.warps;
  const float scale_log2 = scale_log2_of(params);
  return [=](ForwardParams bound, cudaStream_t stream) {
    if (bound.seqlen_new > 0) bound.seqused_k = bound.seqused_before;
    DecodeSchedule part = schedule;
    for (; part.first_batch < bound.batch; part.first_batch += most_batch) {
      const dim3 grid(heads, plan.cluster * plan.clusters,
                      std::min(bound.batch - part.first_batch, most_batch));
      constexpr char kCall[] = "launch of the decode kernel";
      if constexpr (!Config::kHopper) {
        kKernel<<<grid, threads, shared_bytes, stream>>>(bound, part, scale_log2);
        check_cuda(cudaGetLastError(), kCall);
      } else if (plan.cluster == 1) {
        launch_overlapping(kKernel, grid, threads, shared_bytes, stream, kCall, bound, part,
                           scale_log2);
      } else {
        launch(std::array{overlapping(), in_clusters(dim3(1, plan.cluster))}, kKernel, grid,
               threads, shared_bytes, stream, kCall, bound, part, scale_log2);
      }
    }
  };
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures,
          bool kHopper>
struct DecodeRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes = (features_of(kFeatures) & ~kDropout) | kPages | kCacheSlots;
  static constexpr int kTiles = count_tiles(kHeadDimV, kHopper);

  static DecodeLauncher prepare(Params& params, Workspaces& wanted) {
    if constexpr (count_row_tiles(kHeadDimV) > 1) {
      const int64_t rows = int64_t{params.seqlen_q} * (params.nheads / params.nheads_kv);
      if (params.tile >= 0 ? params.tile % 2 == 1 : rows > 16) {
        return prepare_kernel<Config<2>>(params, wanted);
      }
    }
    return prepare_kernel<Config<1>>(params, wanted);
  }

 private:
  template <int kRowTiles>
  using Config = DecodeConfig<T, KV, kHeadDim, kHeadDimV, kFeatures, kRowTiles, kHopper>;
};

}  // namespace flash::decode
