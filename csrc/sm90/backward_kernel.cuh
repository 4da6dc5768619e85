// Attention backward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// A tile is a block of keys of one head of K and V. Thread blocks stay on their SM and take tile
// after tile; each walks over the blocks of queries that see its keys, for each query head of the
// group. P is recomputed from the log-sum-exp, all with keys as rows:
//
//   S^T = K Q^T    P^T = exp(S^T - lse)             dV += P^T dO
//   dP^T = V dO^T  dS^T = P^T * (dP^T - delta)      dK += dS^T Q        dQ += dS K
//
// Their warps have roles:
//
//   producer   one warp: finds the next tile, has TMA load Q and dO block by block, and K and V
//   consumers  two warpgroups: own 64 keys each; dK and dV stay in their registers, and so do P^T
//              and dS^T
//   adders     two warps: have TMA add dQ to a float32 workspace, the second only if that goes in
//              turns
//   idle       two warps, if there is one adder: clear that workspace and round dQ of other heads;
//              or round dQ of the heads that the thread block takes whole, see idle_warps.cuh
//   writers    of lone tiles, in place of adders and idle warps, three warps: write dQ
//
// dQ needs all keys of the tile: dS goes through shared memory, and each warpgroup computes half of
// dQ. The causal or window mask: KeyTileRange takes the blocks of queries that see some key,
// `scores_to_probabilities` hides single keys (common/mask.h). Long sequences without a mask have
// consumers of their own, see long_backward_consumer.cuh.
#pragma once

#include <cuda.h>

#include <cuda/std/utility>

#include "common/sequence.h"
#include "common/shared_address.h"
#include "common/warp.h"
#include "common/with_condition.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/prefetch.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/add_dq.cuh"
#include "sm90/backward_config.cuh"
#include "sm90/backward_consumer.cuh"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_rows.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/idle_warps.cuh"
#include "sm90/long_backward_consumer.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/store.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// ---- Producer ----------------------------------------------------------------------------------

template <typename Config>
__device__ void produce(BackwardProducer<Config> producer) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kHeadDim = Config::kHeadDim;
  static_assert(Config::kHeadDimV == kHeadDim);
  using T = typename Config::T;
  const BackwardParams& params = producer.params;
  const BackwardSchedule& schedule = producer.schedule;
  auto& shared = producer.shared;
  const int lane = producer.lane;
  TileScheduler scheduler(params.counters, schedule,
                          KeyTiles<kBlockN, Config::kHasIdleWarps>{params, schedule}, blockIdx.x,
                          gridDim.x, lane);
  scheduler.begin();  // the rows kernel, which may still run, has no tickets
  TilePipeline<Tile>::State tile_state;
  PipelineState<Config::kKvStages> kv_state;
  PipelineState<Config::kStages> state;
  for (;; next_tile(scheduler, schedule, shared.tiles.sent(tile_state).block)) {
    const Tile tile = key_tile(schedule, scheduler.tile());
    if (tile.batch < 0) {
      producer.announce_end(state.count);
    }
    shared.tiles.send(tile, tile_state, lane);
    if (tile.batch < 0) return;
    const KeyTileRange<Config> range(params, schedule, tile);
    StepIterator step = range.steps(params, schedule, tile);
    ptx::wait_for_earlier_kernels();
    if (step.left == 0) continue;
    const Sequence& sequence = range.sequence;
    const int first_tile = dq_tile<kBlockM>(params, sequence, tile.batch);
    const auto valid_keys = [&] { return sequence.seqlen_k - range.n_begin; };
    // K and V, at one place of the code: with two it would spill.
    const auto load_keys = [&] {
#pragma unroll 1
      for (int tail = kTailOfK; tail <= kTailOfV; ++tail) {
        const bool of_k = tail == kTailOfK;
        auto& pipeline = of_k ? shared.k_pipeline : shared.v_pipeline;
        auto* const stages = of_k ? shared.k : shared.v;
        pipeline.wait_empty(kv_state);
        producer.template load<kBlockN, kHeadDim>(static_cast<Tail>(tail), stages[kv_state.stage()],
                                                  of_k ? producer.maps.k : producer.maps.v,
                                                  pipeline.full[kv_state.stage()], sequence.k_batch,
                                                  sequence.k_first, tile.head_kv, range.n_begin,
                                                  valid_keys(), schedule.clear_tail_k);
      }
    };
    // Q and dO of the first step have room as soon as the tile before is at its last one.
#pragma unroll 1
    for (bool first = true; step.left > 0; first = false, step.next(range.m_blocks)) {
      producer.template load_queries<kHeadDim>(kTailOfQ, shared.q_pipeline, state, shared.q,
                                               producer.maps.q, sequence, step,
                                               producer.statistics(step, first_tile, state));
      if (Config::kKeysBehindQ && first) load_keys();
      producer.template load_queries<kHeadDim>(kTailOfDout, shared.dout_pipeline, state,
                                               shared.dout, producer.maps.dout, sequence, step);
      if (!Config::kKeysBehindQ && first) load_keys();
      producer.announce(range, step, first_tile, state);
      // Rows behind the sequence are cleared while the loads of all four are under way.
#pragma unroll 1
      for (int tail = first ? kTailOfK : kTailOfQ; tail <= kTailOfDout; ++tail) {
        const int stage = state.stage(), kv_stage = kv_state.stage();
        const bool of_keys = tail < kTailOfQ;
        T* const tile = tail == kTailOfK   ? shared.k[kv_stage]
                        : tail == kTailOfV ? shared.v[kv_stage]
                        : tail == kTailOfQ ? shared.q[stage]
                                           : shared.dout[stage];
        uint64_t& full = tail == kTailOfK   ? shared.k_pipeline.full[kv_stage]
                         : tail == kTailOfV ? shared.v_pipeline.full[kv_stage]
                         : tail == kTailOfQ ? shared.q_pipeline.full[stage]
                                            : shared.dout_pipeline.full[stage];
        producer.template finish_load<kHeadDim>(
            tail, tile, full, of_keys ? kBlockN : kBlockM,
            of_keys ? valid_keys() : sequence.seqlen_q - step.m_block * kBlockM,
            of_keys ? schedule.clear_tail_k : schedule.clear_tail_q);
      }
      state.advance();
    }
    kv_state.advance();
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

template <typename Config>
__device__ void consume(const BackwardParams& params, const BackwardMaps& maps,
                        const BackwardSchedule& schedule, float scale_log2,
                        typename Config::SharedStorage& shared, int warpgroup) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFull;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHalves = Config::kHalves;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kRows = kWarpgroupRows;  // of a half: queries
  constexpr int kKSteps = Config::kKSteps, kVSteps = Config::kVSteps;
  constexpr int kSteps = kRows / kWgmmaDepth<T>;  // over the queries of a half
  // Of dK of the last half, in front of dQ. At head dim 128 it is faster to keep some behind dV.
  constexpr int kFirstSteps = kHeadDim > 96 ? kSteps - 1 : kSteps;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warp = warp_uniform(thread / 32);
  const int first_key = warpgroup * kRows + warp * 16;  // of the warp, in the tile

  const uint32_t ds_place = place_of_ds<kBlockM>(warpgroup, warp, lane);
  // The lane's first query of each 8.
  const int first_query = Config::kKeepsStatistics ? keep(lane % 4 * 2) : lane % 4 * 2;
  // Its part of dQ.
  const int dq_half = Config::kDividesDqRows ? warpgroup : 0;
  const int dq_col = Config::kDividesDqRows ? 0 : warpgroup * Config::kDqCols;

  const auto take_steps = [&](const Tile& tile, const auto& range, StepIterator step,
                              bool has_steps, const T* k, const T* v, auto& dk, auto& dv,
                              uint32_t& step_count) {
    const int n_begin = warp_uniform(range.n_begin);
    Operands<kKSteps> k_operands;
    Operands<kVSteps> v_operands;
    if (has_steps) {
      load_operands<T, kBlockN, kKSteps>(k_operands, k, first_key, lane);
      load_operands<T, kBlockN, kVSteps>(v_operands, v, first_key, lane);
    }
    HeadOptions head(params, tile.batch, step.head);
    static_assert(Config::kStages == 2 && Config::kDsStages <= 2);
    int stage;
    uint32_t lap;
    const auto find_stage = [&] {
      stage = warp_uniform_condition(step_count & 1) ? 1 : 0;
      lap = warp_uniform_condition(step_count & 2) ? 1 : 0;
    };
    find_stage();
    const auto rows_of = [&](const T* tile) {
      const KMajor<T, kBlockN> rows(tile, warpgroup * kRows);
      return Config::kKeepsKeys ? rows.kept() : rows;
    };
    const auto k_rows = rows_of(k), v_rows = rows_of(v);
    KMajor<T, kBlockM> q(shared.q[stage]), next_q(shared.q[stage ^ 1]);
    KMajor<T, kBlockM> dout(shared.dout[stage]), next_dout(shared.dout[stage ^ 1]);
#pragma unroll 1
    for (bool more = has_steps; more; ++step_count) {
      if constexpr (!Config::kKeepsStage) find_stage();
      if constexpr (!Config::kKeepsQueries) {
        q = KMajor<T, kBlockM>(shared.q[stage]);
        dout = KMajor<T, kBlockM>(shared.dout[stage]);
      }
      const RingState<Config::kStages> state{static_cast<uint32_t>(stage), lap};
      const PipelineState<Config::kDsStages> ds_state{step_count};
      const PipelineState<Config::kDqStages> dq_state{step_count};
      T* const ds_tile = shared.ds[Config::kDsStages == 1 ? 0 : stage];
      more = warp_uniform_condition(step.left > 1);

      float p[kHalves][1][kRows / 8][4], ds[1][kRows / 8][4];
      const auto start_scores = [&](int half) {
        start_mixed_multiply<T, kHeadDim, kKSteps>(p[half][0], k_operands, k_rows,
                                                   q.from_row(half * kRows));
      };
      const auto start_dp = [&](int half) {
        start_mixed_multiply<T, kHeadDimV, kVSteps>(ds[0], v_operands, v_rows,
                                                    dout.from_row(half * kRows));
      };
      shared.q_pipeline.wait_full(state);
      start_scores(0);
      float2 lse[kRows / 8];
      const float* const statistics = shared.statistics[stage] + first_query;
      load_statistic(lse, statistics);
      shared.dout_pipeline.wait_full(state);
      start_dp(0);
      if constexpr (kHalves == 2) start_scores(1);
      ptx::wgmma_wait<kHalves>(p[0][0]);

      uint32_t p_operands[kSteps][4], ds_operands[kSteps][4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float2 delta[kRows / 8];
        const float* const half_delta = statistics + kBlockM + half * kRows;
        if (half > 0) load_statistic(lse, statistics + half * kRows);
        // Behind S^T: dP^T, dV and dK.
        if (half > 0) ptx::wgmma_wait<3>(p[half][0]);

        if (!kFull) load_statistic(delta, half_delta);
        scores_to_probabilities<T, kFull>(p[half], p_operands, params, range.mask, scale_log2, lse,
                                          head, step.m_block * kBlockM + half * kRows,
                                          n_begin + first_key, lane);
        if (kFull) load_statistic(delta, half_delta);
        // Needed where dS is stored. If it stands here, for each half, its loop keeps the
        // exponentials in front of the wait for dP^T: ptxas would move most of them behind that.
        shared.ds_pipeline.wait_empty(ds_state);
        // Behind dP^T: the other half's S^T or, of the second half, dV and dK of the first.
        half == 0 ? ptx::wgmma_wait<kHalves - 1>(ds[0]) : ptx::wgmma_wait<2>(ds[0]);
        with_condition<kFull>(params.rng_state != nullptr, [&](auto drops) {
#pragma unroll
          for (int n = 0; n < kRows / 8; ++n) {
            differentiate_scores<drops>(ds[0][n], p[half][0][n], delta[n]);
          }
        });
        pack_operands<T>(ds_operands, ds);

        const uint32_t target = shared_address(ds_tile) + ds_place + half * kRows * kPartRowBytes;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          ptx::stmatrix_x4_trans(target + i * 16 * kPartRowBytes, ds_operands[i]);
        }
        if (half < kHalves - 1) {
          start_dp(half + 1);
          start_multiply_accumulate<T>(dv[0], p_operands, MnMajor<T, kBlockM>(dout, half * kRows));
          start_multiply_accumulate<T>(dk[0], ds_operands, MnMajor<T, kBlockM>(q, half * kRows));
        }
      }
      arrive_of_warp(shared.ds_pipeline.full[ds_state.stage()], lane);

      // dK runs while the other warpgroup stores its dS, dV beside the stores of dQ.
      constexpr int kFirstRow = (kHalves - 1) * kRows;
      const MnMajor<T, kBlockM> queries(q, kFirstRow);
      start_multiply<T, true, 0, kFirstSteps>(dk[0], ds_operands, queries);
      shared.ds_pipeline.wait_stored(ds_state);
      if constexpr (!kFull) {  // once more: ptxas then leaves out the first time, which is faster
        ptx::hold(p[kHalves - 1][0]);
        pack_operands<T>(p_operands, p[kHalves - 1]);
      }
      float dq[Config::kDqCols / 8][4];
      start_multiply<T, kBlockN>(dq, KMajor<T, kBlockM>(ds_tile, dq_half * kRows),
                                 MnMajor<T, kBlockN>(k, 0, dq_col));
      start_multiply_accumulate<T>(dv[0], p_operands, MnMajor<T, kBlockM>(dout, kFirstRow));
      if constexpr (kFirstSteps < kSteps) {
        start_multiply<T, true, kFirstSteps, kSteps - kFirstSteps>(dk[0], ds_operands, queries);
        ptx::wgmma_wait<2>(dq);
      } else {
        ptx::wgmma_wait<1>(dq);
      }
      shared.ds_pipeline.release(ds_state, lane);

      // Other warps take it from here.
      shared.dq_pipeline.wait_empty(dq_state);
      float4* const dq_target =
          shared.dq[0] + ((dq_half * 4 + warp) * (kHeadDim / 8) + dq_col / 8) * 32 + lane;
#pragma unroll
      for (int n = 0; n < Config::kDqCols / 8; ++n) {
        // The last columns may lie behind the head dim.
        if (kHeadDim % Config::kDqCols == 0 || dq_col + n * 8 < kHeadDim) {
          dq_target[n * 32] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
        }
      }
      arrive_of_warp(shared.dq_pipeline.full_of(dq_state), lane);
      if constexpr (Config::kKeepsStage) {
        lap ^= stage;
        stage ^= 1;
      }
      if constexpr (Config::kKeepsQueries) {
        cuda::std::swap(q, next_q);
        cuda::std::swap(dout, next_dout);
      }
      ptx::wgmma_wait<0>(dk[0]);
      ptx::wgmma_wait<0>(dv[0]);
      const int releasing = Config::kGradientsInKeys || more ? lane : kNoLane;
      shared.dout_pipeline.release(state, releasing);
      shared.q_pipeline.release(state, releasing);
      if (step.next(range.m_blocks) && more) head = {params, tile.batch, step.head};
    }
  };
  consume_tiles<Config>(params, maps, schedule, shared, warpgroup, warp, lane, take_steps);
}

// ---- Adders, idle warps and writers -----------------------------------------------------------

// By each warp beside the consumers. The producer, helper 0, has nothing to do here.
template <typename Config>
__device__ void bring_dq(const BackwardParams& params, const BackwardSchedule& schedule,
                         typename Config::SharedStorage& shared, int helper, int lane) {
  if constexpr (Config::kHasIdleWarps) {
    if (helper >= 1 && schedule.lone) {
      write_dq<Config>(params, shared, helper - 1, lane);
      return;
    }
    if (helper >= 1 && schedule.head_tiles > 0) {
      float* const accum =
          params.dq_accum + int64_t{blockIdx.x} * schedule.head_tiles * Config::kDqSize;
      if (helper % 2 == 1) {
        shared.idle.template round_heads<Config>(params, accum, helper / 2, lane);
      } else if (lane == 0) {
        add_dq_of_heads<Config>(params, shared, accum);
      }
      return;
    }
    if (helper % 2 == 1 && schedule.idle.head_steps > 0) {
      shared.idle.template run<Config>(params, schedule.idle, helper / 2, lane);
      return;
    }
  }
  if (helper >= 2 && lane == 0) {
    const auto whole = [](int) { return Range{0, 1}; };
    add_dq<Config>(params, schedule, shared, whole, helper - 2, 0);
    if constexpr (Config::kHasIdleWarps) {
      if (helper == 2 && schedule.idle.head_steps > 0) shared.idle.end();
    }
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

// Grid: as many thread blocks as fit the device, or as there are tiles; see prepare_backward.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params,
                    const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardSchedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int lane = threadIdx.x % 32;

  if (threadIdx.x == Config::kThreads - 1) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    ptx::prefetch_tensor_map(&maps.dout);
    ptx::prefetch_tensor_map(&maps.dk);
    ptx::prefetch_tensor_map(&maps.dv);
  }
  if (threadIdx.x == 0) {
    shared.k_pipeline.init(Config::kConsumerWarps);
    shared.v_pipeline.init(Config::kConsumerWarps);
    shared.q_pipeline.init(Config::kConsumerWarps);
    shared.dout_pipeline.init(Config::kConsumerWarps);
    shared.ds_pipeline.init(Config::kConsumerWarps, Config::kConsumerWarps);
    shared.dq_pipeline.init(schedule.lone ? kDqWriters : 1, Config::kConsumerWarps);
    shared.steps.init();
    for (uint64_t& barrier : shared.tail_full) init_barrier(barrier, 1);
    if constexpr (Config::kHasIdleWarps) {
      if (schedule.idle.head_steps > 0 || schedule.head_tiles > 0) shared.idle.init();
    }
    shared.tiles.init(Config::kConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();
  if (schedule.lengths_on_device) ptx::wait_for_earlier_kernels();

  if (threadIdx.x < Config::kConsumerWarps * 32) {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
    if constexpr (Config::kTransposesDq) {
      consume_long<Config>(params, maps, schedule, scale_log2, shared, warpgroup);
    } else {
      consume<Config>(params, maps, schedule, scale_log2, shared, warpgroup);
    }
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int helper = warp_uniform(threadIdx.x / 32) - Config::kConsumerWarps;
    if (helper == 0) {
      produce(BackwardProducer<Config>{params, maps, schedule, shared, lane});
    }
    ptx::wait_for_earlier_kernels();
    // When no tile is left: earlier, all thread blocks of the end kernel would crowd the few SMs
    // that are free first.
    if (helper == 0) ptx::let_next_kernel_start();
    bring_dq<Config>(params, schedule, shared, helper, lane);
  }
}

}  // namespace flash::sm90
