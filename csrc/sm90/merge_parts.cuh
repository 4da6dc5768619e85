// Merges the parts of a forward's tiles whose keys are divided, where these are no clusters.
#pragma once

#include "common/dropout.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "common/workspace_part.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "sm90/forward_parts.cuh"
#include "sm90/tile_range.cuh"

namespace flash::sm90 {

// Each thread merges four columns of a row. Grid: (rows of a tile, divided tiles).
template <typename Config>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts_kernel(const __grid_constant__ ForwardParams params,
                       const __grid_constant__ ForwardSchedule schedule) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kFours = Config::kHeadDimV / 4;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int i = blockIdx.x * kMergeThreads + threadIdx.x, row = i / kFours, four = i % kFours;
  const Tile tile = schedule.whole == 0 ? divided_tile(schedule, blockIdx.y)
                                        : dense_tile(schedule, schedule.whole + blockIdx.y);
  const Sequence sequence = Sequence::whole(params, tile.batch);
  const int first_query = tile.block * schedule.rows;
  const int queries = min(schedule.rows, sequence.seqlen_q - first_query);
  if (row >= queries * schedule.group) return;
  const WorkspacePart<Config::kBlockM, Config::kHeadDimV> first(
      params, int64_t{1} * tile.place * schedule.splits);
  const int head = schedule.head_of(tile.head, row);
  const bool has_sink = Config::kQuantised && params.s_aux != nullptr;
  const float sink = has_sink ? params.s_aux[head] * kLog2e : -INFINITY;
  const Merged merged = first.merged(schedule.splits, 1, row, four, sink);
  float scale = Config::kProbabilityUnit * value_scale<Config>(params, tile);
  if constexpr (kFull && !Config::kQuantised) {
    const Dropout dropout(params, tile.batch, head);
    if (dropout.enabled) scale = dropout.scale;
  }
  store_merged<typename Config::Out>(params, sequence, first_query + schedule.query_of(row), head,
                                     four * 4, merged, scale);
}

}  // namespace flash::sm90
