// Tiles of 64 rows: four warps load, and two warpgroups multiply by WGMMA, 16 rows a warp. Each
// takes every other step of keys, so that one has its softmax while the other multiplies.
//
// Loaders and warpgroups are apart because of the proxy fence between a copy by cp.async and WGMMA:
// a thread that waits at it waits for all its copies, also those of later steps.
#pragma once

#include <cstdint>

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
#include "ptx/named_barrier.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/pipeline.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::decode {

// Waits until all are done with the ring: the loaders, who may take their registers back then, and
// the warpgroups, each at a place of the code.
template <typename Config>
__device__ void finish_ring() {
  constexpr int kBarrier = 1;
  ptx::bar_sync(kBarrier, Config::kThreads);
}

// By one thread, before all wait for it.
template <typename Config>
__device__ void init_barriers(typename Config::SharedStorage& shared) {
  constexpr int kLoaders = 32 * kWarps / sm90::kArrivingLanes;
  shared.ring_pipeline.init(kWarps, kLoaders);
  sm90::init_barrier(shared.queries_full, Config::kWarpgroups * kLoaders);
  sm90::fence_barrier_init();
}

// Starts the copy of the queries, by the warpgroups.
template <typename Config>
__device__ void start_queries(const ForwardParams& params, const Sequence& sequence,
                              const TileRows& tile, typename Config::SharedStorage& shared) {
  constexpr int kLoaders = 32 * kWarps;
  load_queries<Config>(params, sequence, tile, shared_address(shared.q), threadIdx.x - kLoaders,
                       Config::kThreads - kLoaders);
  ptx::cp_async_arrive(shared.queries_full);
}

// Starts the load of the first values, by four warps that have started that of the first keys.
template <typename Config>
__device__ void start_values(KeyLoader<Config>& loader, typename Config::SharedStorage& shared) {
  ptx::cp_async_arrive(shared.ring_pipeline.full_of(typename Config::Ring::State()));
  loader.template load<true>(shared_address(shared.ring[0][1]));
}

// Waits for what has started, by all, where the part has no keys.
// has_keys: whether the first step's have
template <typename Config>
__device__ void finish_start(typename Config::SharedStorage& shared, bool has_keys) {
  ptx::cp_async_wait_all();
  sm90::wait(shared.queries_full, 0);
  if (has_keys) shared.ring_pipeline.wait_full(typename Config::Ring::State());
}

// Loads a part for warpgroups, by four warps: K and V of each step. The first step's loads have
// started, but behind an append; keys that are older are read while it runs.
template <typename Config>
__device__ void load_part(const ForwardParams& params, const DecodeSchedule& schedule,
                          const Part& part, KeyLoader<Config>& loader,
                          typename Config::SharedStorage& shared, int warp) {
  const int old_keys = part.sequence.seqlen_k - params.seqlen_new;
  const int first_key = part.begin + warp * Config::kBlockN;
  int end_key = first_key + Config::kBlockN;  // of the warp's next block
  const uint32_t ring = shared_address(shared.ring);
  typename Config::Ring::State state;
  const auto arrive = [&] {
    ptx::cp_async_arrive(shared.ring_pipeline.full_of(state));
    state.advance();
  };
  const auto load = [&](auto is_values) {
    shared.ring_pipeline.wait_empty(state);
    loader.template load<decltype(is_values)::value>(ring + state.stage() * Config::kSlotBytes);
    arrive();
  };
  int key = part.begin;
  bool follows = follows_append<Config>(params);
  if (!follows) {
    if (schedule.starts_early && first_key + Config::kBlockN > part.end) {
      ptx::cp_async_wait_all();
      loader.clear_tail(reinterpret_cast<unsigned char*>(shared.ring[0][1]), first_key);
      __threadfence_block();
    }
    state.advance();
    arrive();
    key += part.stride;
    end_key += part.stride;
  }
#pragma unroll 1
  for (; key < part.end; key += part.stride, end_key += part.stride) {
    if (follows && end_key > old_keys) {
      ptx::wait_for_earlier_kernels();
      follows = false;
    }
    load(std::false_type());
    load(std::true_type());
  }
}

// Multiplies by every other step of a part, by one of two warpgroups.
template <typename Config>
__device__ void multiply_part(const ForwardParams& params, const Part& part, bool has_sinks,
                              float scale_log2, typename Config::SharedStorage& shared,
                              int warpgroup, int warp, int lane) {
  using T = typename Config::T;
  using Rows = LaneRows<Config>;
  constexpr int kKeys = Config::kKeys;
  auto& pipeline = shared.ring_pipeline;
  if (follows_append<Config>(params)) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
    start_queries<Config>(params, part.sequence, part.tile, shared);
  }
  Rows rows(params, part, warp * sm90::kWarpRows, has_sinks && warpgroup == 0, scale_log2, 1.f,
            lane);
  float out[1][Config::kHeadDimV / 8][4] = {};
  typename Rows::Scores scores;
  typename Rows::Probabilities p;
  using State = typename Config::Ring::State;
  State state{2u * warpgroup};
  sm90::wait_for_stores(shared.queries_full, 0);
  const int first_key = part.begin + warpgroup * part.stride;
#pragma unroll 1
  for (int key = first_key; key < part.end; key += Config::kWarpgroups * part.stride) {
    pipeline.wait_stored(state);
    // Of wide heads the descriptors of Q would be spilled: they are computed anew.
    const int offset = Config::kHeadDim > 192 ? ptx::opaque(0) : 0;
    sm90::start_multiply<T, Config::kHeadDim>(
        scores[0], sm90::KMajor<T, Config::kRows>(shared.q + warp_uniform(offset)),
        sm90::KMajor<T, kKeys>(shared.ring[0][warp_uniform(state.stage())]));
    ptx::wgmma_wait<0>(scores[0]);
    pipeline.release(state, lane);
    rows.transform_scores(scores, params, part, key, lane);
    float factors[2];
    if (follow_maxima(rows.softmax, scores, factors, WarpTeam())) rescale_output(out, factors);
    rows.exponentiate(scores);
    Rows::round(p, scores);
    const State values = state.next();
    pipeline.wait_stored(values);
    sm90::start_multiply_accumulate<T>(
        out[0], reinterpret_cast<const uint32_t (&)[kKeys / 16][4]>(p),
        sm90::MnMajor<T, kKeys>(shared.ring[0][warp_uniform(values.stage())]));
    ptx::wgmma_wait<0>(out[0]);
    pipeline.release(values, lane);
    state = State{state.count + 2 * Config::kWarpgroups};
  }
  finish_ring<Config>();
  leave_result<Config>(shared, warpgroup, warp * sm90::kWarpRows, part.tile, rows.softmax, out,
                       lane);
}

}  // namespace flash::decode
