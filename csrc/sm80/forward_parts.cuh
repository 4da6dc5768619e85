// A forward's tiles whose keys are divided. Each part leaves what it has of its rows in a
// workspace, and the kernel behind merges them.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "common/merge.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/softmax.h"
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

// What a part leaves: output, not divided by the sums, and of each row its reference and sum.
template <typename Config>
struct TilePart {
  static constexpr int kFours = Config::kHeadDimV / 4;

  float4 (*out)[kFours];
  float2* rows;

  // place: of its thread block in the forward's grid
  __device__ TilePart(const ForwardParams& params, int64_t place)
      : out(reinterpret_cast<float4 (*)[kFours]>(params.partial_out) + place * Config::kBlockM),
        rows(reinterpret_cast<float2*>(params.partial_rows) + place * Config::kBlockM) {}

  // By a warp of `team`, whose rows begin at first_row and are valid_rows at most.
  template <int kRowTiles, int kOutTiles, typename Team>
  __device__ void leave(SoftmaxState<kRowTiles>& softmax,
                        const float (&accumulators)[kRowTiles][kOutTiles][4], int first_row,
                        int valid_rows, const Team& team, int lane) const {
    team.sum(softmax.sum);
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = r * 8 + lane / 4;
      if (row >= valid_rows) break;
      if (lane % 4 == 0 && team.rank == 0) {
        rows[first_row + row] = make_float2(softmax.reference[r], softmax.sum[r]);
      }
      leave_row(out[first_row + row], accumulators[r / 2], r % 2, lane,
                [&](int n) { return team.col_tile(n); });
    }
  }
};

constexpr int kMergeThreads = 128;

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
  const TilePart<Config> first(params, first_part * params.nheads + head);
  const auto row_of = [&](int part) { return part * params.nheads * Config::kBlockM + row; };
  const Merged merged = merge<8>(
      params.num_splits, [&](int part) { return first.rows[row_of(part)]; },
      [&](int part) { return first.out[row_of(part)][four]; });
  const Dropout dropout(params, batch, head);
  store_merged<typename Config::T, kFull>(params, sequence, query, head, four * 4, merged,
                                          kFull && dropout.enabled ? dropout.scale : 1.f);
}

}  // namespace flash::sm80
