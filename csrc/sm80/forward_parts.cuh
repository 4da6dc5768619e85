// A forward's tiles whose keys are divided, and the kernel that merges their parts.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/sequence_tiles.h"
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

// Which sequence, and where in it, the queries of a thread block begin; negative, or behind its
// end: nowhere.
struct QueryBlock {
  int batch, begin;

  // Under a causal mask the last queries see the most keys: they go first, so that short blocks
  // fill the end. from_last: which one of m_blocks from first_m_block on. If tiles are packed these
  // are blocks of all sequences.
  __device__ static QueryBlock find(const ForwardParams& params, const SequenceTiles& tiles,
                                    int batch, int first_m_block, int m_blocks, int from_last) {
    const int block_m = tiles.rows.value;
    if (!tiles.packed()) return {batch, (first_m_block + m_blocks - 1 - from_last) * block_m};
    const auto [sequence, block] = tiles.find(first_m_block + from_last);
    const int last = tiles.rows.quotient(max(Sequence::whole(params, sequence).seqlen_q - 1, 0));
    return {sequence, (last - block) * block_m};
  }
};

// Each thread merges four columns of a row. Grid: (all heads' rows of a block of queries, query
// blocks, batch), see QueryBlock.
template <typename Config>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts_kernel(const __grid_constant__ ForwardParams params,
                       const __grid_constant__ SequenceTiles tiles, int first_m_block,
                       int first_batch) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kFours = Config::kHeadDimV / 4;
  const int64_t i = int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  const int four = i % kFours, row = i / kFours % Config::kBlockM;
  const int head = i / kFours / Config::kBlockM;
  const auto [batch, begin] = QueryBlock::find(params, tiles, first_batch + blockIdx.z,
                                               first_m_block, gridDim.y, blockIdx.y);
  const int query = begin + row;
  const Sequence sequence = Sequence::whole(params, batch);
  if (head >= params.nheads || query < 0 || query >= sequence.seqlen_q) return;
  const int64_t first_part = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * params.num_splits;
  const WorkspacePart<Config::kBlockM, Config::kHeadDimV> first(params,
                                                                first_part * params.nheads + head);
  const Merged merged = first.merged(params.num_splits, params.nheads, row, four);
  const Dropout dropout(params, batch, head);
  store_merged<typename Config::T, kFull>(params, sequence, query, head, four * 4, merged,
                                          kFull && dropout.enabled ? dropout.scale : 1.f);
}

}  // namespace flash::sm80
