// The consumers of the Hopper backward of long sequences without a mask. Their products are those
// of backward_kernel.cuh, but dQ^T = K^T dS^T: an operand of 80 queries has too many rows for one
// WGMMA and too few for two.
#pragma once

#include <cstdint>

#include "common/shared_address.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/backward_consumer.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/long_backward_config.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// P^T of the keys from `valid` on becomes 0. valid: of the warp's 16 keys
template <int kColTiles>
__device__ void hide_keys(float (&p)[1][kColTiles][4], int valid, int lane) {
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) p[0][n][j] = lane / 4 + j / 2 * 8 < valid ? p[0][n][j] : 0.f;
  }
}

template <typename Config>
__device__ void consume_long(const BackwardParams& params, const BackwardMaps& maps,
                             const BackwardSchedule& schedule, float scale_log2,
                             typename Config::SharedStorage& shared, int warpgroup) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kColTiles = kBlockM / 8;            // of S^T, dP^T and dQ^T
  constexpr int kSteps = kBlockM / kWgmmaDepth<T>;  // over the queries
  constexpr int kFirstSteps = kSteps / 2;           // of dK, in front of dQ
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warp = warp_uniform(thread / 32);
  const int first_key = warpgroup * kWarpgroupRows + warp * 16;  // of the warp, in the tile

  const uint32_t ds_place = place_of_ds<kBlockM>(warpgroup, warp, lane);

  const auto take_steps = [&](const Tile&, const auto& range, const StepIterator& step,
                              bool has_steps, const T* k, const T* v, auto& dk, auto& dv,
                              uint32_t& step_count) {
    const int valid_keys = warp_uniform(range.sequence.seqlen_k - range.n_begin - first_key);
    int left = warp_uniform(step.left);
#pragma unroll 1
    for (bool more = has_steps; more; ++step_count) {
      static_assert(Config::kStages == 2 && Config::kDsStages == 2);
      const int stage = warp_uniform_condition(step_count & 1) ? 1 : 0;
      const PipelineState<Config::kStages> state{step_count};
      const PipelineState<Config::kDsStages> ds_state{step_count};
      const PipelineState<Config::kDqStages> dq_state{step_count};
      const T* const q = shared.q[stage];
      const T* const dout = shared.dout[stage];
      T* const ds_tile = shared.ds[stage];
      const float* const statistics = shared.statistics[stage] + lane % 4 * 2;
      more = warp_uniform_condition(left-- > 1);

      float p[1][kColTiles][4], ds[1][kColTiles][4];
      shared.q_pipeline.wait_full(state);
      start_multiply<T, kHeadDim>(p[0], KMajor<T, kBlockN>(k, warpgroup * kWarpgroupRows),
                                  KMajor<T, kBlockM>(q));
      shared.dout_pipeline.wait_full(state);
      start_multiply<T, kHeadDimV>(ds[0], KMajor<T, kBlockN>(v, warpgroup * kWarpgroupRows),
                                   KMajor<T, kBlockM>(dout));
      ptx::wgmma_wait<1>(p[0]);
      float2 lse[kColTiles];
      load_statistic(lse, statistics);
      exponentiate(p, lse, scale_log2);
      if (valid_keys < 16) hide_keys(p, valid_keys, lane);
      ptx::wgmma_wait<0>(ds[0]);
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(statistics + kBlockM + n * 8);
        differentiate_scores<false>(ds[0][n], p[0][n], delta);
      }
      // All operands are complete before a product that reads some is started: else ptxas finds too
      // few registers, and has each product waited for.
      uint32_t p_operands[kSteps][4], ds_operands[kSteps][4];
      pack_operands<T>(p_operands, p);
      pack_operands<T>(ds_operands, ds);

      shared.ds_pipeline.wait_empty(ds_state);
      const uint32_t target = shared_address(ds_tile) + ds_place;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        ptx::stmatrix_x4_trans(target + i * 16 * kPartRowBytes, ds_operands[i]);
      }
      arrive_of_warp(shared.ds_pipeline.full[ds_state.stage()], lane);
      // These run while the other warpgroup stores its dS.
      start_multiply_accumulate<T>(dv[0], p_operands, MnMajor<T, kBlockM>(dout));
      const MnMajor<T, kBlockM> queries(q);
      start_multiply<T, true, 0, kFirstSteps>(dk[0], ds_operands, queries);

      shared.ds_pipeline.wait_stored(ds_state);
      float dq[kColTiles][4];
      start_multiply<T, kBlockN>(dq, MnMajor<T, kBlockN>(k, 0, warpgroup * kWarpgroupRows),
                                 KMajor<T, kBlockM>(ds_tile));
      start_multiply<T, true, kFirstSteps, kSteps - kFirstSteps>(dk[0], ds_operands, queries);
      ptx::wgmma_wait<1>(dv[0]);
      ptx::wgmma_wait<1>(dq);
      const int releasing = more ? lane : kNoLane;
      shared.dout_pipeline.release(state, releasing);
      shared.ds_pipeline.release(ds_state, lane);

      // Other warps take it from here: for each 8 queries (16 columns, 32 lanes).
      shared.dq_pipeline.wait_empty(dq_state);
      float4* const dq_target = shared.dq[0] + (warpgroup * 4 + warp) * 32 + lane;
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
        dq_target[n * (kHeadDim / 16 * 32)] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
      }
      arrive_of_warp(shared.dq_pipeline.full_of(dq_state), lane);
      ptx::wgmma_wait<0>(dk[0]);
      shared.q_pipeline.release(state, releasing);
    }
  };
  consume_tiles<Config>(params, maps, schedule, shared, warpgroup, warp, lane, take_steps);
}

}  // namespace flash::sm90
