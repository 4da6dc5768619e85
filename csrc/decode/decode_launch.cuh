// Launches the decode kernel; sm80 and sm90 differ in the memory that its loads take, and in how it
// follows the kernel before.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
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

// Thread blocks that run at a time, in clusters.
// alone: each has an SM to itself
template <typename Config>
int slots_of(int cluster, bool alone) {
  constexpr auto kKernel = decode_kernel<Config>;
  const size_t shared_bytes = alone ? Config::kBytesAlone : Config::kSharedBytes;
  static DeviceFacts known[2][Config::kMostCluster + 1]{};
  if (cluster > 1) {
    return cluster * clusters_of_device(reinterpret_cast<const void*>(kKernel), dim3(1, cluster),
                                        Config::kThreads, shared_bytes, known[alone][cluster]);
  }
  const int blocks_per_sm = of_device(known[alone][cluster], [=](int) {
    int count;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kKernel, Config::kThreads,
                                                             shared_bytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return count;
  });
  return blocks_per_sm * multiprocessors();
}

// The rows that read the same keys, and the tiles that they make.
template <typename Config>
struct Rows {
  int group;
  int64_t rows;
  int tiles;  // of a key head

  explicit Rows(const ForwardParams& params)
      : group(params.nheads / params.nheads_kv),
        rows(int64_t{params.seqlen_q} * group),
        tiles(static_cast<int>((rows + Config::kRows - 1) / Config::kRows)) {
    if (rows > INT_MAX) {
      throw std::invalid_argument("seqlen_q * query heads of a key head: got " +
                                  std::to_string(rows) + "; accepted: up to 2^31 - 1");
    }
  }
  int of_tile() const { return static_cast<int>(std::min<int64_t>(rows, Config::kRows)); }
};

template <typename Config>
void allow_launches() {
  static std::atomic<uint64_t> devices{0}, wide_devices{0};
  allow_shared_memory(decode_kernel<Config>, Config::kBytesAlone, devices);
  if constexpr (Config::kHopper) {
    allow(decode_kernel<Config>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, wide_devices);
  }
}

template <typename Config>
DecodePlan plan_kernel(const ForwardParams& params) {
  allow_launches<Config>();
  const Rows<Config> rows(params);
  const int heads = params.nheads_kv * rows.tiles;
  constexpr int kMostCluster = Config::kMostCluster;
  DecodeWork work{};
  work.tiles = int64_t{params.batch} * heads;
  work.same_keys = rows.tiles;
  work.is_e4m3 = Config::kIsE4m3;
  work.tile_rows = Config::kRows;
  work.rows = rows.of_tile();
  work.rows_of_threads = Config::kThreads / (Config::kHeadDimV / 4.f);
  work.step_keys = Config::kStepKeys;
  work.step_bytes = int64_t{Config::kStepKeys} * (params.headdim + params.headdim_v) *
                    sizeof(typename Config::KV);
  work.most_splits = kMostSplits;
  work.most_cluster = kMostCluster;
  work.received_rows = Config::kReceivedRows;
  // Where several clusters merge, each slice of a tile takes a counter.
  work.counted = int64_t{heads} * kMostCluster <= kKeptZero;
  work.sms = multiprocessors();
  return plan_decode(params, work, slots_of<Config>);
}

// Divides each tile's keys as planned.
inline void divide(DecodeSchedule& schedule, const DecodePlan& plan) {
  schedule.splits = plan.splits;
  schedule.cluster = plan.cluster;
  schedule.clusters = plan.clusters;
  schedule.cluster_reciprocal = (1 << 16) / plan.cluster + 1;
  schedule.slice_rows = (schedule.rows + plan.cluster - 1) / plan.cluster;
}

// Completes the parameters; returns what launches with the addresses of any tensors of this layout.
template <typename Config>
DecodeLauncher prepare_kernel(const DecodePlan& plan, ForwardParams& params, Workspaces& wanted) {
  constexpr auto kKernel = decode_kernel<Config>;
  const Rows<Config> rows(params);
  const int heads = params.nheads_kv * rows.tiles;  // of the grid
  params.num_splits = plan.splits;
  // A larger append does not let this kernel start early.
  if (params.batch > kFewSequences) params.seqlen_new = 0;
  DecodeSchedule schedule{};
  const bool reads_from_first_key = params.window_left < 0 || params.window_left >= params.seqlen_k;
  schedule.starts_early = reads_from_first_key && params.seqlen_new == 0 &&
                          params.cu_seqlens_k == nullptr && params.cache_batch_idx == nullptr &&
                          params.leftpad_k == nullptr;
  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  schedule.group = Divisor(rows.group);
  schedule.row_tiles = Divisor(rows.tiles);
  schedule.rows = rows.of_tile();
  divide(schedule, plan);
  schedule.page_size = Divisor(std::max(params.page_size, 1));
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
  const bool alone = plan.cluster > 1 && blocks <= slots_of<Config>(plan.cluster, true);
  const size_t shared_bytes = alone ? Config::kBytesAlone : Config::kSharedBytes;
  const float scale_log2 = scale_log2_of(params);
  return [=](ForwardParams bound, cudaStream_t stream) {
    if (bound.seqlen_new > 0) bound.seqused_k = bound.seqused_before;
    DecodeSchedule part = schedule;
    // Where the stream has no room for such clusters, tiles have fewer parts, in as many clusters:
    // these need no larger workspaces.
    if (part.cluster > kPortableCluster &&
        clusters_at_a_time(reinterpret_cast<const void*>(kKernel), dim3(1, part.cluster),
                           Config::kThreads, shared_bytes, stream) == 0) {
      divide(part, {kPortableCluster * part.clusters, kPortableCluster});
    }
    for (; part.first_batch < bound.batch; part.first_batch += most_batch) {
      const auto start = [&](auto... attributes) {
        const dim3 grid(heads, part.cluster * part.clusters,
                        std::min(bound.batch - part.first_batch, most_batch));
        launch(std::array<cudaLaunchAttribute, sizeof...(attributes)>{attributes...}, kKernel, grid,
               Config::kThreads, shared_bytes, stream, "launch of the decode kernel", bound, part,
               scale_log2);
      };
      const cudaLaunchAttribute clusters = in_clusters(dim3(1, part.cluster));
      if constexpr (!Config::kHopper) {
        start();
      } else if (bound.seqlen_new > 0) {
        start(clusters, overlapping());
      } else {  // thread blocks that start while another kernel ends crowd the SMs that it has left
        start(clusters);
      }
    }
  };
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures,
          bool kHopper>
struct DecodeRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes =
      (features_of(kFeatures) & ~(kDropout | kPlace)) | kPages | kCacheSlots;
  static constexpr int kWideRows = wide_rows(kHopper, std::is_same_v<KV, __nv_fp8_e4m3>, kHeadDimV);
  static constexpr int kTiles = kWideRows > 0 ? 2 : 1;

  static DecodeLauncher prepare(Params& params, Workspaces& wanted) {
    const DecodePlan narrow = plan_kernel<Config<16>>(params);
    if constexpr (kTiles > 1) {
      const int64_t rows = int64_t{params.seqlen_q} * (params.nheads / params.nheads_kv);
      if (params.tile == 1 || (params.tile < 0 && rows > 16)) {
        const DecodePlan wide = plan_kernel<Config<kWideRows>>(params);
        // Where a number of parts is given, the batch must not decide.
        if (params.tile == 1 || params.num_splits > 0 || wide.time <= narrow.time) {
          return prepare_kernel<Config<kWideRows>>(wide, params, wanted);
        }
      }
    }
    return prepare_kernel<Config<16>>(narrow, params, wanted);
  }

 private:
  template <int kRows>
  using Config = DecodeConfig<T, KV, kHeadDim, kHeadDimV, kFeatures, kRows, kHopper>;
};

}  // namespace flash::decode
