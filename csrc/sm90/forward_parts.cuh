// What the consumers of the Hopper forward have in common, in 16 bits and in 8: their tiles, their
// matmuls' operands, the end of a tile.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common/mask.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "common/workspace_part.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/griddepcontrol.h"
#include "ptx/named_barrier.h"
#include "ptx/opaque.h"
#include "sm90/forward_config.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/quantised_softmax.cuh"
#include "sm90/split.cuh"
#include "sm90/store.cuh"
#include "sm90/tile_range.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// Ids of named barriers: of the consumers of a tile; for each of their warpgroups a turn, and one
// that its queries are rounded.
enum NamedBarrier { kMerge = 1, kTurn, kRounded = kTurn + 3 };

// Boxes have kBoxCols<T> columns; outside the tensors they read zeros.
struct ForwardMaps {
  CUtensorMap q;    // (batch, nheads_kv, rows, nheads / nheads_kv, headdim), box: a tile's queries
  CUtensorMap k;    // (slots, nheads_kv, rows, headdim), box: key_box_rows
  CUtensorMap v;    // (slots, nheads_kv, rows, headdim_v); quantised: (batch, nheads_kv, headdim_v,
                    // places of keys), box: a block of keys, or as it comes, box: a square
  CUtensorMap out;  // like q, if the output is staged; box: the rows of a warp
};

// Before a warp first reads or writes device memory. Parts of the tiles left over need not wait:
// all thread blocks of the launch before theirs, which does the other tiles, have waited when these
// start.
template <typename Config>
__device__ void wait_for_earlier_kernels(const ForwardSchedule& schedule) {
  if (!Config::kMayFollowWhole || schedule.whole == 0) ptx::wait_for_earlier_kernels();
}

template <typename Config>
using TileState = typename TilePipeline<typename Config::Sent>::State;

// What is known of a tile that has been sent.
template <typename Config>
__device__ typename Config::Range range_of(const ForwardParams& params,
                                           const ForwardSchedule& schedule, const Tile& sent) {
  return {params, schedule, sent};
}
template <typename Config>
__device__ const typename Config::Range& range_of(const ForwardParams&, const ForwardSchedule&,
                                                  const RangedTile<typename Config::Range>& sent) {
  return sent.range;
}

// Turns of the consumer warpgroups of a tile. Whoever holds its turn issues matmuls while the
// others are at their softmax. Two streams mix by themselves.
template <typename Config>
struct Turns {
  const int warpgroup, next;

  __device__ explicit Turns(int warpgroup)
      : warpgroup(warpgroup), next(warpgroup + 1 == Config::kConsumers ? 0 : warpgroup + 1) {
    if (next == 0) pass();  // the first is the first warpgroup's
  }
  __device__ void take() const {
    if (Config::kTurns) ptx::bar_sync(kTurn + warpgroup, 2 * kWarpgroup);
  }
  __device__ void pass() const {
    if (Config::kTurns) ptx::bar_arrive(kTurn + next, 2 * kWarpgroup);
  }
};

// A consumer warpgroup: where it is in each pipeline, and its matmuls. `k` is the place of a block
// of keys: that of the values, kv_state, or the next.
template <typename Config>
struct Consumer {
  using T = typename Config::T;
  using V = typename Config::V;
  // With three stages a division by three stands before each barrier of a step. (Where operands
  // have 16 bits the other state has not been measured.)
  static constexpr bool kRing = Config::kQuantised && Config::kStages == 3;
  using KvState =
      std::conditional_t<kRing, RingState<Config::kStages>, PipelineState<Config::kStages>>;

  typename Config::SharedStorage& shared;
  const int warpgroup, lane;
  KvState kv_state;
  PipelineState<Config::kQStages> q_state;
  TileState<Config> tile_state;

  __device__ Tile receive_tile() { return shared.tiles.receive(tile_state, lane); }
  // The same, but it stays in shared memory, at tile(), until it is released.
  __device__ const typename Config::Sent& look_at_tile() { return shared.tiles.look(tile_state); }
  __device__ const typename Config::Sent& tile() const {
    return shared.tiles.slots[warp_uniform(tile_state.stage())];
  }
  __device__ void release_tile() {
    shared.tiles.release(tile_state, lane);
    tile_state.advance();
  }

  __device__ void wait_for_q() { shared.q_pipeline.wait_full(q_state); }
  __device__ void wait_for_k(KvState k) { shared.k_pipeline.wait_full(k); }
  __device__ void wait_for_v() { shared.v_pipeline.wait_full(kv_state); }
  __device__ void wait_for_k_and_v(KvState k) {
    wait_for_both(shared.k_pipeline.full[k.stage()], k.phase(),
                  shared.v_pipeline.full[kv_state.stage()], kv_state.phase());
  }
  __device__ BlockScales scales_of(KvState k) const {
    if constexpr (Config::kScaled) return shared.scales[warp_uniform(k.stage())];
    return {1.f, 1.f};
  }
  __device__ void release_q() { shared.q_pipeline.release(q_state, lane); }
  __device__ void release_k(KvState k) { shared.k_pipeline.release(k, lane); }
  __device__ void release_v() { shared.v_pipeline.release(kv_state, lane); }

  // What stays in registers of Q, for all steps of a tile.
  using Queries = Operands<Config::kQSteps>;
  __device__ void load_q(Queries& q) const {
    const int row = warpgroup * kWarpgroupRows + threadIdx.x / 32 % 4 * 16;
    load_operands<T, Config::kBlockM, Config::kQSteps>(q, shared.q[warp_uniform(q_state.stage())],
                                                       row, lane);
  }
  // S = Q K^T. (The compiler shall know that a stage is the same in all lanes.)
  __device__ void begin_scores(typename Config::Score (&scores)[1][Config::kBlockN / 8][4],
                               const Queries& loaded, KvState k) {
    const KMajor<T, Config::kBlockM, uint64_t> q(shared.q[warp_uniform(q_state.stage())],
                                                 warpgroup * kWarpgroupRows);
    start_mixed_multiply<T, Config::kHeadDim, Config::kQSteps>(
        scores[0], loaded, q,
        KMajor<T, Config::kBlockN, uint64_t>(shared.k[warp_uniform(k.stage())]));
  }
  // O += P V
  __device__ void begin_output(float (&out)[1][Config::kHeadDimV / 8][4],
                               const uint32_t (&p)[Config::kBlockN / kWgmmaDepth<V>][4]) {
    auto& v = shared.v[warp_uniform(kv_state.stage())];
    start_multiply_accumulate<V>(out[0], p, MnMajor<V, Config::kBlockN, uint64_t>(v));
  }
  // The same of quantised values; O = P V if not `accumulate`.
  __device__ void begin_quantised_output(float (&out)[1][Config::kHeadDimV / 8][4],
                                         const uint32_t (&p)[Config::kBlockN / kWgmmaDepth<V>][4],
                                         bool accumulate) {
    using Values = KMajor<V, Config::kHeadDimV, uint32_t, Config::kValueRowBytes>;
    start_multiply_or_accumulate<V>(out[0], p, Values(shared.v[warp_uniform(kv_state.stage())]),
                                    accumulate);
  }
  // O += P V, and P times ones: the sum of each row, eight times. (By turns: the tensor cores take
  // a step of P twice in a row.)
  __device__ void begin_output_and_sums(float (&out)[1][Config::kHeadDimV / 8][4],
                                        float (&sums)[1][4],
                                        const uint32_t (&p)[Config::kBlockN / kWgmmaDepth<V>][4]) {
    using Values = KMajor<V, Config::kHeadDimV, uint32_t, Config::kValueRowBytes>;
    const Values v(shared.v[warp_uniform(kv_state.stage())]);
    const KMajor<V, 8, uint32_t, kOnesRowBytes> ones(shared.ones);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kBlockN / kWgmmaDepth<V>; ++k) {
      ptx::wgmma<Values::kTrans>(out[0], p[k], v.step(k), true, V());
      ptx::wgmma<Values::kTrans>(sums, p[k], ones.step(0), k > 0, V());
    }
    ptx::wgmma_commit();
  }

  // Reads nothing of a block: none of its queries sees it.
  __device__ void skip_block(bool is_last) {
    wait_for_k(kv_state);
    release_k(kv_state);
    if (is_last && !Config::kScaled) {
      wait_for_q();
      release_q();
    }
    wait_for_v();
    release_v();
    kv_state.advance();
  }
};

// The end of a tile for the two rows, `first_row` and `first_row + 8`, of which a lane holds some
// elements. (Where operands have 8 bits: quantised_epilogue.cuh.)
template <typename Config>
struct Epilogue {
  using Out = typename Config::Out;
  float factors[2];  // what the output is multiplied by
  Out* targets[2];   // where it goes; null: the row holds no query

  // Writes the log-sum-exp. scale: of the output
  __device__ void finish_softmax(const ForwardParams& params, const TileRows& tile_rows,
                                 const Tile& tile, SoftmaxState<1>& softmax, float scale,
                                 int first_row, int lane) {
    // What it needs of the sequence is read again instead of occupying registers.
    const Sequence sequence(params, ptx::opaque(tile.batch));
    const int m_begin = ptx::opaque(tile.block) * tile_rows.rows;
    float lse[2];
    finish_rows(softmax, scale, factors, lse, WarpTeam());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8, query = m_begin + tile_rows.query_of(row);
      const int head = tile_rows.head_of(tile.head, row), place = sequence.q_first + query;
      const bool valid = row < tile_rows.rows * tile_rows.group && query < sequence.seqlen_q;
      targets[half] = valid ? rows_of<Out>(params.out, sequence.q_batch, place, head) : nullptr;
      if (valid && lane % 4 == 0) {
        params.lse[sequence.q_batch * params.lse_batch_stride + head * params.lse_head_stride +
                   place] = lse[half];
      }
    }
  }

  __device__ void store_output(const ForwardParams& params,
                               float (&out)[1][Config::kHeadDimV / 8][4], int lane) const {
    rescale_output(out, factors);
    store_accumulators<Out, Config::kStreams == 2 ? 2 : 4>(targets, params.headdim_v, out[0], lane);
  }
};

// What merged values of a tile are multiplied by, beside other scales.
template <typename Config>
__device__ float value_scale(const ForwardParams& params, const Tile& tile) {
  return Config::kQuantised ? descale_of(params.v_descale, tile.batch, tile.head_kv) : 1.f;
}

// By the consumers of a tile whose keys are divided, in the end: merges its parts and stores rows.
// Parts that are no cluster are left for merge_parts_kernel.
// scale: of the output
template <typename Config>
__device__ void merge_tile(const ForwardParams& params, const ForwardSchedule& schedule,
                           const Tile& tile, typename Config::Part& mine, SoftmaxState<1>& softmax,
                           const float (&out)[1][Config::kHeadDimV / 8][4], float scale,
                           int first_row, int lane) {
  constexpr int kThreads = Config::kConsumers * kWarpgroup, kFours = Config::kHeadDimV / 4;
  const Sequence sequence(params, tile.batch);
  const int queries = min(schedule.rows, sequence.seqlen_q - tile.block * schedule.rows);
  if (schedule.apart) {
    WarpTeam().sum(softmax.sum);
    WorkspacePart<Config::kBlockM, Config::kHeadDimV>(
        params, int64_t{1} * tile.place * schedule.splits + tile.part)
        .leave(
            softmax, out, first_row - lane / 4, queries * schedule.group, true,
            [](int n) { return n; }, lane);
    return;
  }
  ptx::bar_sync(kMerge, kThreads);  // all are done with the keys
  mine.leave(softmax, out, first_row, lane);
  ptx::cluster_sync();
  scale *= value_scale<Config>(params, tile);
  float sink = -INFINITY;
  for (int i = threadIdx.x;; i += kThreads) {
    const int row = tile.part + i / kFours * schedule.splits, four = i % kFours;
    if (row >= queries * schedule.group) break;
    const int query = schedule.query_of(row), head = schedule.head_of(tile.head, row);
    // Of operands in 8 bits sinks join here: one part more.
    const bool has_sink = Config::kQuantised && params.s_aux != nullptr;
    if (has_sink) sink = params.s_aux[head] * kLog2e;
    const Merged merged = merge<4>(
        schedule.splits + has_sink,
        [&](int part) {
          if (part == schedule.splits) return make_float2(sink, 1.f);
          return *ptx::map_to_rank(&mine.rows[row], part);
        },
        [&](int part) {
          if (part == schedule.splits) return make_float4(0.f, 0.f, 0.f, 0.f);
          return *ptx::map_to_rank(&mine.out[row][four], part);
        });
    store_merged<typename Config::Out>(params, sequence, tile.block * schedule.rows + query, head,
                                       four * 4, merged, scale);
  }
  ptx::cluster_arrive_relaxed();  // what has been stored need not be visible
  ptx::cluster_wait();            // others have read this shared memory
}

}  // namespace flash::sm90
