// Launches the Hopper forward.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <numeric>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/forward_kernel.cuh"
#include "sm90/forward_plan.h"
#include "sm90/merge_parts.cuh"
#include "sm90/tensor_map.h"

namespace flash::sm90 {

// K and V of the heads that run together take at most this much of the L2 cache.
constexpr int64_t kSectionBytes = 16 << 20;

// Tiles for each SM in the last section under a mask, if heads have at least kManyBlocks of them,
// and if they have fewer. Simulated for causal masks: with 4 the SMs are busy 97 to 99 % of the
// time, with the other sections' number 86 to 97 %. But not larger than so many of those, for the
// cache's sake.
constexpr int kLastTiles = 4, kLastOfFew = 2;
constexpr int kManyBlocks = 6;
constexpr int kLastSections = 3;

// Longest K, and fewest tiles for each SM, for which tiles under a mask are drawn before they are
// wanted.
constexpr int kDrawEarlyKeys = 2048;
constexpr int kDrawEarlyTiles = 6;

// Packed sequences whose tiles are drawn together, at most: a lane has each (tile_of_all).
constexpr int kSequencesTogether = 32;

// Of packed sequences it is an upper bound: each may end with a tile of its own.
inline int64_t most_tickets(const ForwardParams& params, const ForwardSchedule& schedule) {
  if (params.cu_seqlens_q == nullptr) return schedule.tickets;
  const int64_t blocks = params.total_q / schedule.rows + int64_t{1} * params.batch;
  return blocks * schedule.heads * schedule.splits;
}

// whole: tiles that are not divided, at most
template <typename Config>
ForwardSchedule make_schedule(const ForwardParams& params, int whole, bool apart) {
  const int most_splits = apart ? kMostApart : kMostSplits;
  const int splits = Config::kDivided ? std::min(params.num_splits, most_splits) : 1;
  ForwardSchedule schedule{};
  schedule.splits = splits;
  schedule.apart = apart;
  schedule.group = heads_in_tile(params, Config::kFeatures, Config::kBlockM);
  schedule.rows = Config::kBlockM / schedule.group;
  schedule.group_reciprocal = (65536 + schedule.group - 1) / schedule.group;
  schedule.heads = params.nheads / schedule.group;
  schedule.heads_of_kv = schedule.heads / params.nheads_kv;
  schedule.blocks = (params.seqlen_q + schedule.rows - 1) / schedule.rows;
  // Packed sequences may be fewer tiles than this.
  const int64_t tiles = int64_t{schedule.blocks} * schedule.heads * params.batch;
  schedule.tiles = static_cast<int>(std::min<int64_t>(tiles, INT_MAX));
  schedule.whole = std::min(whole, schedule.tiles);
  schedule.tickets = schedule.count_tickets();
  // Without a mask all tiles are equally long, and one head after the other reads memory least.
  const bool masked = params.window_left < params.seqlen_k || params.window_right < params.seqlen_q;
  const int64_t head_bytes = (int64_t{sizeof(typename Config::T)} * params.headdim +
                              int64_t{sizeof(typename Config::V)} * params.headdim_v) *
                             params.seqlen_k;
  const int64_t all_heads_kv = int64_t{1} * params.batch * params.nheads_kv;
  const auto heads_of = [&](int64_t heads_kv) {
    return static_cast<int>(std::clamp<int64_t>(heads_kv, 1, all_heads_kv) * schedule.heads_of_kv);
  };
  schedule.section = heads_of(masked ? kSectionBytes / head_bytes : 1);
  const int64_t last_of_sm = schedule.blocks >= kManyBlocks ? kLastTiles : kLastOfFew;
  const int64_t last_tiles = masked ? last_of_sm * multiprocessors() : 1;
  schedule.last_section =
      std::min(heads_of(last_tiles / (int64_t{1} * schedule.blocks * schedule.heads_of_kv) + 1),
               heads_of(int64_t{kLastSections} * schedule.section / schedule.heads_of_kv));
  if (whole == 0) {
    schedule.section *= splits;
    schedule.last_section *= splits;
  }
  // Drawing takes about a microsecond. Where tiles are short it is hidden, where they differ much
  // they had better not be reserved for a busy thread block.
  schedule.draw_early =
      !masked || (params.seqlen_k <= kDrawEarlyKeys &&
                  schedule.tickets > int64_t{kDrawEarlyTiles} * multiprocessors());
  schedule.page_size = Divisor(params.block_table == nullptr ? 1 : params.page_size);
  // A box may not cross pages, which leftpad_k may begin within.
  schedule.key_box_rows = params.block_table == nullptr ? Config::kBlockN
                          : params.leftpad_k != nullptr
                              ? 1
                              : std::gcd(Config::kBlockN, params.page_size);
  schedule.clear_tail = params.cu_seqlens_k != nullptr || params.seqused_k != nullptr ||
                        params.block_table != nullptr;
  schedule.lengths_on_device = schedule.clear_tail || params.cu_seqlens_q != nullptr ||
                               params.leftpad_k != nullptr || params.cache_batch_idx != nullptr;
  schedule.boxes_out = kWarpRows % schedule.group == 0;
  const bool has_cache = params.block_table != nullptr || params.seqused_k != nullptr;
  schedule.mixed = params.cu_seqlens_q != nullptr && has_cache && schedule.blocks > 1 &&
                   splits == 1 && schedule.tickets > multiprocessors();
  const int64_t most = most_tickets(params, schedule);
  schedule.together = masked && params.cu_seqlens_q != nullptr && splits == 1 &&
                      params.batch <= kSequencesTogether && most > multiprocessors() &&
                      most <= int64_t{kLastTiles} * multiprocessors();
  schedule.complete();
  return schedule;
}

template <typename Config>
ForwardMaps make_maps(const typename Config::Params& params, const ForwardSchedule& schedule) {
  using T = typename Config::T;
  const bool packed_q = params.cu_seqlens_q != nullptr, packed_k = params.cu_seqlens_k != nullptr;
  const int64_t rows_q = packed_q ? params.total_q : params.seqlen_q;
  const int64_t rows_k = packed_k                        ? params.total_k
                         : params.block_table != nullptr ? params.page_size
                                                         : params.seqlen_k;
  const int64_t batch_q = packed_q ? 1 : params.batch, slots_k = params.slots_k;
  const int64_t group = params.nheads / params.nheads_kv;
  const auto keys = [&](auto type, const Operand& x, int headdim) {
    return encode_tensor_map<decltype(type), 3>(x.data, headdim,
                                                {{rows_k, x.row_stride, schedule.key_box_rows},
                                                 {params.nheads_kv, x.head_stride, 1},
                                                 {slots_k, x.batch_stride, 1}});
  };
  const Operand& q = params.q;
  int headdim_q = params.headdim;
  if constexpr (Config::kScaled) headdim_q = params.headdim_q;
  ForwardMaps maps;
  maps.q =
      encode_tensor_map<typename Config::Query, 4>(q.data, headdim_q,
                                                   {{group, q.head_stride, schedule.group},
                                                    {rows_q, q.row_stride, schedule.rows},
                                                    {params.nheads_kv, q.head_stride * group, 1},
                                                    {batch_q, q.batch_stride, 1}});
  if constexpr (Config::kStagedOutput) {
    const Operand& out = params.out;
    const int box_heads = schedule.boxes_out ? schedule.group : 1;
    maps.out =
        encode_tensor_map<typename Config::Out, 4>(out.data, params.headdim_v,
                                                   {{group, out.head_stride, box_heads},
                                                    {rows_q, out.row_stride, kWarpRows / box_heads},
                                                    {params.nheads_kv, out.head_stride * group, 1},
                                                    {batch_q, out.batch_stride, 1}});
  }
  maps.k = keys(T(), params.k, params.headdim);
  const Operand& v = params.v;
  if constexpr (Config::kTransposes) {
    const Operand& rows = params.raw_v;
    maps.v = encode_tensor_map<typename Config::V, 3, kSquareRows>(
        rows.data, params.headdim_v,
        {{rows_k, rows.row_stride, kSquareRows},
         {params.nheads_kv, rows.head_stride, 1},
         {slots_k, rows.batch_stride, 1}});
  } else if constexpr (Config::kQuantisedValues) {
    maps.v = encode_tensor_map<typename Config::V, 3, Config::kBlockN>(
        v.data, params.places_v,
        {{params.headdim_v, v.row_stride, Config::kHeadDimV},
         {params.nheads_kv, v.head_stride, 1},
         {packed_k ? 1 : params.batch, v.batch_stride, 1}});
  } else {
    maps.v = keys(typename Config::V(), v, params.headdim_v);
  }
  return maps;
}

template <typename Config>
constexpr size_t shared_bytes() {
  return Config::kStreams * sizeof(typename Config::SharedStorage);
}

template <typename Config>
void allow_launches() {
  static std::atomic<uint64_t> devices{0}, wide_devices{0};
  allow_shared_memory(forward_kernel<Config>, shared_bytes<Config>(), devices);
  if constexpr (Config::kDivided) {
    allow(forward_kernel<Config>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, wide_devices);
  }
}

// Thread blocks that run at a time, in clusters of this size.
template <typename Config>
int slots_of(int cluster) {
  if (cluster == 1) return multiprocessors();
  static DeviceFacts known[kMostSplits + 1]{};
  allow_launches<Config>();
  return cluster * clusters_of_device(reinterpret_cast<const void*>(&forward_kernel<Config>),
                                      dim3(cluster), Config::kThreads, shared_bytes<Config>(),
                                      known[cluster]);
}

template <typename Config>
using ForwardLauncher = std::function<void(const typename Config::Params&, cudaStream_t)>;

// Completes the parameters; returns what launches with the addresses of any tensors of this layout.
// A kernel that does not divide takes the first `whole` tiles, one that does the others.
// apart: the parts of a tile are no cluster
template <typename Config>
ForwardLauncher<Config> prepare_kernel(typename Config::Params& params, int whole, bool apart,
                                       Workspaces& wanted) {
  constexpr auto kKernel = forward_kernel<Config>;
  constexpr size_t kSharedBytes = shared_bytes<Config>();
  allow_launches<Config>();

  params.window_left = bounded_window(params.window_left, params.seqlen_k);
  params.window_right = bounded_window(params.window_right, params.seqlen_q);
  const ForwardSchedule schedule = make_schedule<Config>(params, whole, apart);
  const int splits = schedule.splits;
  const int64_t tiles = most_tickets(params, schedule);
  // The parts of a tile are a cluster, of which no thread block takes another.
  const int grid = static_cast<int>(Config::kDivided ? tiles - schedule.whole
                                                     : std::min<int64_t>(tiles, multiprocessors()));
  const int divided = schedule.tiles - schedule.whole;
  if (apart) {
    const int64_t rows = int64_t{divided} * splits * Config::kBlockM;
    wanted.add("partial_out", params.partial_out, rows * Config::kHeadDimV);
    wanted.add("partial_rows", params.partial_rows, rows * 2);
  }
  const ForwardMaps prepared = make_maps<Config>(params, schedule);
  const float scale_log2 = scale_log2_of(params);
  return [=](const typename Config::Params& bound, cudaStream_t stream) {
    ForwardMaps maps = prepared;
    replace_address(maps.q, bound.q.data);
    replace_address(maps.k, bound.k.data);
    if constexpr (Config::kTransposes) {
      replace_address(maps.v, bound.raw_v.data);
    } else {
      replace_address(maps.v, bound.v.data);
    }
    if constexpr (Config::kStagedOutput) replace_address(maps.out, bound.out.data);
    constexpr char kCall[] = "launch of the sm90 forward kernel";
    if constexpr (Config::kDivided) {
      if (apart) {
        launch_overlapping(kKernel, grid, Config::kThreads, kSharedBytes, stream, kCall, bound,
                           maps, schedule, scale_log2);
        constexpr int kFours = Config::kBlockM * (Config::kHeadDimV / 4);
        launch_overlapping(merge_parts_kernel<Config>,
                           dim3((kFours - 1) / kMergeThreads + 1, divided), kMergeThreads, 0,
                           stream, "launch of the kernel that merges parts of an sm90 forward",
                           bound, schedule);
        return;
      }
      const dim3 cluster(splits);
      if (splits > kPortableCluster &&
          clusters_at_a_time(reinterpret_cast<const void*>(kKernel), cluster, Config::kThreads,
                             kSharedBytes, stream) == 0) {
        typename Config::Params fewer = bound;
        fewer.num_splits = kPortableCluster;
        Workspaces none(fewer);
        return prepare_kernel<Config>(fewer, whole, false, none)(fewer, stream);
      }
      launch(std::array{overlapping(), in_clusters(cluster)}, kKernel, grid, Config::kThreads,
             kSharedBytes, stream, kCall, bound, maps, schedule, scale_log2);
    } else {
      launch_overlapping(kKernel, grid, Config::kThreads, kSharedBytes, stream, kCall, bound, maps,
                         schedule, scale_log2);
    }
  };
}

// The launches of a call.
template <typename Whole, typename Divided>
ForwardLauncher<Whole> prepare_plan(const ForwardPlan& plan, typename Whole::Params& params,
                                    Workspaces& wanted) {
  wanted.add_kept_zero("counters", params.counters);
  params.num_splits = plan.splits;
  if (plan.splits == 1) return prepare_kernel<Whole>(params, INT_MAX, false, wanted);
  const auto parts = prepare_kernel<Divided>(params, plan.whole, plan.apart, wanted);
  if (plan.whole == 0) return parts;
  const auto first = prepare_kernel<Whole>(params, plan.whole, false, wanted);
  return [=](const typename Whole::Params& bound, cudaStream_t stream) {
    first(bound, stream);
    parts(bound, stream);
  };
}

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct ForwardRow {
  static_assert(std::is_same_v<T, KV>);
  using Params = ForwardParams;
  static constexpr uint32_t kTakes = features_of(kFeatures) | kPages | kCacheSlots;
  static constexpr int kTiles = count_forward_tiles(kHeadDim, kHeadDimV, kFeatures);

  template <int kChoice, bool kDivided>
  using Config =
      ForwardConfig<T, T, Out, kHeadDim, kHeadDimV, kFeatures, Values::kPlain, kChoice, kDivided>;

  static auto prepare(Params& params, Workspaces& wanted) {
    const ForwardPlan plan =
        plan_forward(params, kFeatures, kHeadDim, kHeadDimV, slots_of<Config<0, true>>);
    return prepare_choice<0>(plan, params, wanted);
  }

 private:
  template <int kChoice>
  static ForwardLauncher<Config<0, false>> prepare_choice(const ForwardPlan& plan, Params& params,
                                                          Workspaces& wanted) {
    if constexpr (kChoice + 1 < kTiles) {
      if (plan.tile != kChoice) return prepare_choice<kChoice + 1>(plan, params, wanted);
    }
    return prepare_plan<Config<kChoice, false>, Config<kChoice, true>>(plan, params, wanted);
  }
};

}  // namespace flash::sm90
