// A forward's tiles whose keys are divided, and the kernel that merges their parts.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/workspace_part.h"
#include "params.h"

namespace flash::sm80 {

// One of several equal parts of the blocks of some keys, whose first begins a block.
template <int kBlockN>
__device__ Range keys_of_part(Range keys, int part, int parts) {
  if (parts <= 1 || keys.empty()) return keys;
  const int blocks = (keys.end - keys.begin - 1) / kBlockN + 1;
  const int begin = keys.begin + blocks * part / parts * kBlockN;
  return {begin, min(keys.end, keys.begin + blocks * (part + 1) / parts * kBlockN)};
}

// Each thread merges four columns of a row. Grid: (all heads' rows of a block of queries, query
// blocks, batch).
template <typename Config>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts_kernel(const __grid_constant__ ForwardParams params, int first_m_block,
                       int first_batch) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kFours = Config::kHeadDimV / 4;
  const int i = blockIdx.x * kMergeThreads + threadIdx.x, four = i % kFours;
  const int row = i / kFours % Config::kBlockM, head = i / kFours / Config::kBlockM;
  const int batch = first_batch + blockIdx.z;
  const int query = (first_m_block + gridDim.y - 1 - blockIdx.y) * Config::kBlockM + row;
  const Sequence sequence = Sequence::whole(params, batch);
  if (head >= params.nheads || query >= sequence.seqlen_q) return;
  const int64_t first_part = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * params.num_splits;
  const WorkspacePart<Config::kBlockM, Config::kHeadDimV> first(params,
                                                                first_part * params.nheads + head);
  const Merged merged = first.merged(params.num_splits, params.nheads, row, four);
  const Dropout dropout(params, batch, head);
  store_merged<typename Config::T, kFull>(params, sequence, query, head, four * 4, merged,
                                          kFull && dropout.enabled ? dropout.scale : 1.f);
}

}  // namespace flash::sm80
