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

// Completes the parameters; returns what launches with the addresses of any tensors of this layout.
template <typename Config>
DecodeLauncher prepare_kernel(ForwardParams& params, Workspaces& wanted) {
  constexpr auto kKernel = decode_kernel<Config>;
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(kKernel, Config::kSharedBytes, devices);
  static DeviceFacts known{};
  const int blocks_per_sm = of_device(known, [=](int) {
    int count;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kKernel, Config::kThreads,
                                                             Config::kSharedBytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return count;
  });

  const int group = params.nheads / params.nheads_kv;
  const int64_t rows = int64_t{params.seqlen_q} * group;
  const int row_tiles = static_cast<int>((rows + Config::kRows - 1) / Config::kRows);
  const int heads = params.nheads_kv * row_tiles;  // of the grid
  const int64_t tiles = int64_t{params.batch} * heads;
  // Each tile that is divided takes a counter.
  const int splits = choose_splits(
      params, tiles, Config::kStepKeys,
      int64_t{Config::kStepKeys} * (params.headdim + params.headdim_v) * sizeof(typename Config::T),
      std::min<int64_t>(rows, Config::kRows) * Config::kHeadDimV * sizeof(float),
      int64_t{blocks_per_sm} * multiprocessors(), tiles <= kKeptZero ? kMostSplits : 1);
  params.num_splits = splits;
  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);

  DecodeSchedule schedule{};
  schedule.splits = splits;
  schedule.splits_reciprocal =
      splits == 1 ? 0 : static_cast<unsigned>((int64_t{1} << 32) / splits) + 1;
  schedule.group = group;
  schedule.row_tiles = row_tiles;
  schedule.rows = static_cast<int>(std::min<int64_t>(rows, Config::kRows));
  schedule.page_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (params.page_size == 1 << shift) schedule.page_shift = shift;
  }
  if (splits > 1) {
    const int64_t stored_rows = tiles * splits * schedule.rows;
    wanted.add("partial_out", params.partial_out, stored_rows * Config::kHeadDimV);
    wanted.add("partial_rows", params.partial_rows, stored_rows * 2);
    wanted.add_kept_zero("counters", params.counters);
  }
  const float scale_log2 = scale_log2_of(params);
  return [=](const ForwardParams& bound, cudaStream_t stream) {
    DecodeSchedule part = schedule;
    for (; part.first_batch < bound.batch; part.first_batch += kMaxGrid) {
      const dim3 grid(heads, splits, std::min(bound.batch - part.first_batch, kMaxGrid));
      constexpr char kCall[] = "launch of the decode kernel";
      if constexpr (Config::kOverlaps) {
        launch_overlapping(kKernel, grid, Config::kThreads, Config::kSharedBytes, stream, kCall,
                           bound, part, scale_log2);
      } else {
        kKernel<<<grid, Config::kThreads, Config::kSharedBytes, stream>>>(bound, part, scale_log2);
        check_cuda(cudaGetLastError(), kCall);
      }
    }
  };
}

template <typename T, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures,
          bool kOverlaps>
struct DecodeRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes = (features_of(kFeatures) & ~kDropout) | kPages | kCacheSlots;
  static constexpr int kTiles = count_tiles(kHeadDimV);

  static DecodeLauncher prepare(Params& params, Workspaces& wanted) {
    if constexpr (kTiles > 1) {
      const int64_t rows = int64_t{params.seqlen_q} * (params.nheads / params.nheads_kv);
      if (params.tile == 1 || (params.tile < 0 && rows > 16)) {
        return prepare_kernel<Config<2>>(params, wanted);
      }
    }
    return prepare_kernel<Config<1>>(params, wanted);
  }

 private:
  template <int kRowTiles>
  using Config = DecodeConfig<T, kHeadDim, kHeadDimV, kFeatures, kRowTiles, kOverlaps>;
};

}  // namespace flash::decode
