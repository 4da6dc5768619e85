// Tiles of 64 rows: four warps load, and a warpgroup multiplies by WGMMA, 16 rows a warp.
//
// Loaders and warpgroup are apart because of the proxy fence between a copy by cp.async and WGMMA:
// a thread that waits at it waits for all its copies, also those of later steps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/fragment.h"
#include "common/shared_address.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "decode/decode_config.cuh"
#include "decode/decode_part.cuh"
#include "decode/key_loader.cuh"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/griddepcontrol.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/pipeline.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::decode {

// By one thread, before all wait for it.
template <typename Config>
__device__ void init_barriers(typename Config::SharedStorage& shared) {
  constexpr int kLoaders = 32 * kWarps / sm90::kArrivingLanes;
  shared.ring_pipeline.init(kWarps, kLoaders);
  sm90::init_barrier(shared.queries_full, kLoaders);
  sm90::fence_barrier_init();
}

// Starts the first loads, by four warps: of K and V of the first step, and of the queries.
template <typename Config>
__device__ void start_for_warpgroup(const ForwardParams& params, const Sequence& sequence,
                                    const TileRows& tile, KeyLoader<Config>& loader,
                                    typename Config::SharedStorage& shared) {
  const uint32_t ring = shared_address(shared.ring);
  load_queries<Config>(params, sequence, tile, shared_address(shared.q));
  loader.template load<false>(ring);
  ptx::cp_async_arrive(shared.queries_full);
  ptx::cp_async_arrive(shared.ring_pipeline.full_of(typename Config::Ring::State()));
  loader.template load<true>(ring + Config::kSlotBytes);
}

// Waits for them, where the part has no keys.
template <typename Config>
__device__ void finish_start(typename Config::SharedStorage& shared) {
  ptx::cp_async_wait_all();
  sm90::wait(shared.queries_full, 0);
  shared.ring_pipeline.wait_full(typename Config::Ring::State());
}

// Loads a part for a warpgroup, by four warps: K and V of each step, and K of one more, which holds
// nothing. The first loads have started, but behind an append; keys that are older are read while
// it runs.
template <typename Config>
__device__ void load_part(const ForwardParams& params, const DecodeSchedule& schedule,
                          const Part& part, KeyLoader<Config>& loader,
                          typename Config::SharedStorage& shared, int warp) {
  const bool follows = follows_append<Config>(params);
  const int old_keys = part.sequence.seqlen_k - params.seqlen_new;
  const int first_key = part.begin + warp * Config::kBlockN;
  int end_key = first_key + Config::kBlockN;  // of the warp's next block
  const uint32_t ring = shared_address(shared.ring);
  typename Config::Ring::State state;
  bool has_queries = !follows;
  const auto start_queries = [&] {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
    load_queries<Config>(params, part.sequence, part.tile, shared_address(shared.q));
    ptx::cp_async_arrive(shared.queries_full);
    has_queries = true;
  };
  const auto arrive = [&] {
    ptx::cp_async_arrive(shared.ring_pipeline.full_of(state));
    state.advance();
  };
  const auto load = [&](auto is_values) {
    if (!has_queries && (end_key > old_keys || state.count + 1 == Config::kSlots)) start_queries();
    shared.ring_pipeline.wait_empty(state);
    loader.template load<decltype(is_values)::value>(ring + state.stage() * Config::kSlotBytes);
    arrive();
  };
  int key = part.begin;
  if (follows) {
    load(std::false_type());
  } else {
    state.advance();
    if (schedule.starts_early && first_key + Config::kBlockN > part.end) {
      ptx::cp_async_wait_all();
      loader.clear_tail(reinterpret_cast<unsigned char*>(shared.ring[0][1]), first_key);
      __threadfence_block();
    }
    if (key < part.end) {
      arrive();
      load(std::false_type());
      key += part.stride;
    }
  }
#pragma unroll 1
  for (; key < part.end; key += part.stride) {
    load(std::true_type());
    end_key += part.stride;
    load(std::false_type());
  }
  if (!has_queries) start_queries();
  __syncthreads();  // the warpgroup is done with the ring
}

// Multiplies by a part, by a warpgroup. A step starts the next scores before its softmax, which is
// also when the output of the step before is computed.
template <typename Config>
__device__ void multiply_part(const ForwardParams& params, const Part& part, bool has_sinks,
                              float scale_log2, typename Config::SharedStorage& shared, int warp,
                              int lane) {
  using T = typename Config::T;
  using Rows = LaneRows<Config>;
  constexpr int kKeys = Config::kKeys;
  auto& pipeline = shared.ring_pipeline;
  Rows rows(params, part, warp * 16, has_sinks, scale_log2, 1.f, lane);
  float out[1][Config::kHeadDimV / 8][4] = {};
  typename Rows::Scores scores, next_scores;
  typename Rows::Probabilities p;
  using State = typename Config::Ring::State;
  State state;
  const auto start_scores = [&](auto keys) {
    pipeline.wait_stored(keys);
    // Of wide heads the descriptors of Q would be spilled: they are computed anew.
    const int offset = Config::kHeadDim > 192 ? ptx::opaque(0) : 0;
    sm90::start_multiply<T, Config::kHeadDim>(
        next_scores[0], sm90::KMajor<T, Config::kRows>(shared.q + warp_uniform(offset)),
        sm90::KMajor<T, kKeys>(shared.ring[0][warp_uniform(keys.stage())]));
  };
  sm90::wait_for_stores(shared.queries_full, 0);
  start_scores(state);
  ptx::wgmma_wait<0>(next_scores[0]);
  pipeline.release(state, lane);
#pragma unroll 1
  for (int key = part.begin; key < part.end; key += part.stride) {
    const auto values = state.next(), next_keys = values.next();
    for_each(scores, [&](float& x, int m, int n, int j) { x = next_scores[m][n][j]; });
    start_scores(next_keys);
    rows.transform_scores(scores, params, part, key, lane);
    float factors[2];
    const bool rescales = follow_maxima(rows.softmax, scores, factors, WarpTeam());
    rows.exponentiate(scores);
    ptx::wgmma_wait<0>(out[0]);
    ptx::wgmma_wait<0>(next_scores[0]);
    pipeline.release(next_keys, lane);
    if (key > part.begin) pipeline.release(State{state.count - 1}, lane);  // V of the step before
    if (rescales) rescale_output(out, factors);
    Rows::round(p, scores);
    pipeline.wait_stored(values);
    sm90::start_multiply_accumulate<T>(
        out[0], reinterpret_cast<const uint32_t (&)[kKeys / 16][4]>(p),
        sm90::MnMajor<T, kKeys>(shared.ring[0][warp_uniform(values.stage())]));
    state = next_keys;
  }
  ptx::wgmma_wait<0>(out[0]);
  __syncthreads();  // the warpgroup is done with the ring
  leave_result<Config>(shared, 0, warp * 16, part.tile, rows.softmax, out, lane);
}

}  // namespace flash::decode
