// One part of the keys of one tile, and what warps have of it.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/divisor.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/merge.h"
#include "common/pack.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "decode/decode_config.cuh"
#include "decode/e4m3_matmul.h"
#include "params.h"
#include "ptx/cp_async.h"

namespace flash::decode {

// What the host decides about a launch.
struct DecodeSchedule {
  int splits;              // parts of a tile's keys at most
  int cluster;             // thread blocks of a cluster, or 1: parts that are neighbours
  int clusters;            // of a tile
  int cluster_reciprocal;  // row / cluster = row * this >> 16, of rows of a tile
  int slice_rows;          // that a thread block of the cluster merges at most
  Divisor group;           // query heads that read the same keys
  Divisor row_tiles;       // of a key head
  int rows;                // of a tile at most
  Divisor page_size;       // 1 without pages
  int first_batch;         // of the launch
  bool starts_early;       // loads begin before the length of a sequence is known
};

// Whether the kernel starts while an append is running, whose predecessors have ended.
template <typename Config>
__device__ bool follows_append(const ForwardParams& params) {
  return Config::kHopper && params.seqlen_new > 0;
}

// The rows of one tile of a sequence.
struct TileRows {
  int first, rows;       // of the pairs of a query and a head, heads fastest
  const Divisor& group;  // of the schedule
  int head_kv;

  __device__ int query_of(int row) const { return group.quotient(first + row); }
  __device__ int head_of(int row) const {
    return head_kv * group.value + first + row - query_of(row) * group.value;
  }
};

// Starts the copy of the tile's queries, by `threads` threads of which this is one. What is in the
// other rows stays there. q: shared address
template <typename Config>
__device__ void load_queries(const ForwardParams& params, const Sequence& sequence,
                             const TileRows& tile, uint32_t q, int thread, int threads) {
  using T = typename Config::T;
  using Layout = typename Config::QueryLayout;
  for (int i = thread; i < tile.rows * Layout::kChunks; i += threads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const T* const source = rows_of<const T>(
        params.q, sequence.q_batch, sequence.q_first + tile.query_of(row), tile.head_of(row));
    ptx::cp_async_16_zfill(q + Layout::offset(row, chunk), source + chunk * 8,
                           chunk * 8 < params.headdim);
  }
}

// Leaves a warp's softmax and output in shared memory, from row `first_row` of a result on. The
// ring is not in use any more.
template <typename Config>
__device__ void leave_result(typename Config::SharedStorage& shared, int result, int first_row,
                             const TileRows& tile, SoftmaxState<Config::kRowTiles>& softmax,
                             const float (&out)[Config::kRowTiles][Config::kHeadDimV / 8][4],
                             int lane) {
  WarpTeam().sum(softmax.sum);
#pragma unroll
  for (int r = 0; r < 2 * Config::kRowTiles; ++r) {
    if (first_row + r * 8 >= tile.rows) break;
    const int row = first_row + r * 8 + lane / 4;
    if (lane % 4 == 0) {
      shared.out[result][row][Config::kFours] =
          make_float4(softmax.reference[r], softmax.sum[r], 0.f, 0.f);
    }
    if constexpr (Config::kIsE4m3) {
      auto* const target = shared.out[result][row] + lane % 4;
#pragma unroll
      for (int n = 0; n < Config::kHeadDimV / 8; n += 2) {
        target[n * 2] = columns_of(out[r / 2][n], out[r / 2][n + 1], r % 2);
      }
    } else {
      leave_row(shared.out[result][row], out[r / 2], r % 2, lane);
    }
  }
}

// One part of the keys of one tile: steps of keys, one in as many as there are parts.
struct Part {
  Sequence sequence;
  TileRows tile;
  Mask mask;
  int batch, first_query, end_query;  // of the tile
  int begin, end, stride;             // keys: of the first step, of the tile, from step to step
};

// The rows that a lane holds some elements of, of accumulators of m16n8: their scores and softmax.
template <typename Config>
struct LaneRows {
  static constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  static constexpr int kRowTiles = Config::kRowTiles, kColTiles = Config::kKeys / 8;
  using Scores = float[kRowTiles][kColTiles][4];
  using Probabilities = uint32_t[kColTiles / 2][kRowTiles][4];  // A operands

  int queries[2 * kRowTiles];
  float slopes[2 * kRowTiles];
  ScoreTransform transform;
  SoftmaxState<kRowTiles> softmax;

  // first_row: of the warp
  // has_sinks: whether sinks count here, as they do in one of those who share a row
  // key_unit: what Q K^T is to be multiplied by
  __device__ LaneRows(const ForwardParams& params, const Part& part, int first_row, bool has_sinks,
                      float scale_log2, float key_unit, int lane)
      : transform(params, part.batch, 0, part.mask.shift, key_unit),
        softmax(first_softmax(params, part, first_row, has_sinks, scale_log2, lane)) {
    transform.slope = 0.f;  // heads differ: ALiBi is applied here
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = first_row + r * 8 + lane / 4;
      queries[r] = part.tile.query_of(row);
      if constexpr (kFull) {
        const int head = part.tile.head_of(row);
        slopes[r] = ScoreTransform(params, part.batch, head, part.mask.shift, key_unit).slope;
      }
    }
  }

  // Softcap, ALiBi and mask of the scores of the keys from `key` on.
  __device__ void transform_scores(Scores& scores, const ForwardParams& params, const Part& part,
                                   int key, int lane) const {
    const Mask& mask = part.mask;
    const int col = key + lane % 4 * 2;
    const auto mask_scores = [&] {
      if (!mask.cuts(part.first_query, part.end_query - part.first_query, key, Config::kKeys)) {
        return;
      }
      apply_mask(scores, mask, [&](int m, int half) { return queries[2 * m + half]; }, col);
    };
    if constexpr (kFull) {
      transform.apply(scores, 0, col, mask_scores, [](int, int, int, float) {});
      if (params.alibi_slopes != nullptr) {
        for_each(scores, [&](float& score, int m, int n, int j) {
          const int r = 2 * m + j / 2, distance = col + n * 8 + j % 2 - queries[r] - mask.shift;
          score -= slopes[r] * fabsf(static_cast<float>(distance));
        });
      }
    }
    mask_scores();
  }

  // exp(S) in the place of S.
  __device__ void exponentiate(Scores& scores) {
    for_each(scores, [&](float& x, int m, int, int j) { x = softmax.exponentiate(x, m, j); });
  }

  // As in the sm80 forward, accumulators become A operands where they are.
  __device__ static void round(Probabilities& p, const Scores& scores) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const float (&x)[4] = scores[m][n];
        p[n / 2][m][n % 2 * 2] = pack(x[0], x[1], typename Config::P());
        p[n / 2][m][n % 2 * 2 + 1] = pack(x[2], x[3], typename Config::P());
      }
    }
  }

 private:
  __device__ static SoftmaxState<kRowTiles> first_softmax(const ForwardParams& params,
                                                          const Part& part, int first_row,
                                                          bool has_sinks, float scale_log2,
                                                          int lane) {
    float sinks[2 * kRowTiles];
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int head = part.tile.head_of(first_row + r * 8 + lane / 4);
      sinks[r] = has_sinks && params.s_aux != nullptr ? params.s_aux[head] : -INFINITY;
    }
    return {scale_log2, sinks, lane % 4 == 0};
  }
};

}  // namespace flash::decode
