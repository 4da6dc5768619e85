// Attention backward for Hopper, head dims above 128. The products are those of
// backward_kernel.cuh; there dK and dV of 128 keys would not fit the registers.
//
// A tile is a block of 128 keys of one head of K and V, for a cluster of two thread blocks with 64
// keys each. Both walk over the same blocks of queries. Their warps have roles:
//
//   producer      one warp: has TMA load K and V, then Q and dO block by block
//   probabilities a warpgroup: S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO
//   gradients     a warpgroup: dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dK += dS^T Q
//   dQ            a warpgroup: dQ = dS K, 128 columns of it, for the keys of both thread blocks
//   sender        one warp: has dS copied to the other thread block
//   adders        two warps: have TMA add dQ to a float32 workspace; the second only if in turns
//
// dV and dK stay in registers. P^T goes from thread to thread in 16 bits: both warpgroups hold a
// tile of scores in the same way. What the warpgroups hand over is buffered, so that nobody runs in
// step with another.
#pragma once

#include <cuda.h>

#include "common/range.h"
#include "common/sequence.h"
#include "common/shared_address.h"
#include "common/warp.h"
#include "common/with_condition.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/griddepcontrol.h"
#include "ptx/prefetch.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/add_dq.cuh"
#include "sm90/backward_parts.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_rows.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/store.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"
#include "sm90/wide_backward_config.cuh"

namespace flash::sm90 {

// Which chunks of dQ's columns a thread block computes. Of an odd number the middle one is the
// first's and the second's in turns.
template <typename Config>
__device__ Range dq_chunks(int rank, int row_tile) {
  constexpr int kChunks = Config::kHeadDim / Config::kDqChunkCols;
  const int middle = (kChunks + (row_tile % 2 == 0 ? 1 : 0)) / 2;
  return rank == 0 ? Range{0, middle} : Range{middle, kChunks};
}

// The first column of peer_k: the first that a thread block may have to compute.
template <typename Config>
__device__ int first_dq_col(int rank) {
  return rank * (Config::kHeadDim - Config::kDqCols);
}

// ---- Producer ----------------------------------------------------------------------------------

// What all warps of both thread blocks have in common: the tile they work on, and how far they are.
// The first thread block draws tiles, and sends each to the other too.
template <typename Config>
struct WideTiles {
  typename Config::SharedStorage& shared;
  const int rank, lane;
  TilePipeline<Tile>::State state;
  PipelineState<1> keys;    // tiles with steps
  uint32_t step_count = 0;  // of all tiles before

  // By the warp that draws.
  __device__ void send(const Tile& tile) {
    shared.tiles.wait_empty(state);
    const int slot = state.stage();
    if (lane == 0) {
      shared.tiles.slots[slot] = tile;
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
      ptx::copy_in_cluster(ptx::map_to_rank(&shared.tiles.slots[slot], 1),
                           &shared.tiles.slots[slot], sizeof(Tile),
                           ptx::map_to_rank(&shared.tiles.full[slot], 1));
    }
    arrive_of_warp(shared.tiles.full[slot], lane);
  }
  // By one warp of the other thread block.
  __device__ void expect() {
    if (lane == 0) arrive_expecting(shared.tiles.full[state.stage()], sizeof(Tile));
  }

  // It stays where it is until `next`.
  __device__ const Tile& look() { return shared.tiles.look(state); }
  // steps: of the tile
  __device__ void next(int steps) {
    step_count += steps;
    if (steps > 0) keys.advance();
    __syncwarp();
    if (lane < kArrivingLanes) {
      ptx::arrive_in_cluster(ptx::map_to_rank(&shared.tiles.empty[state.stage()], 0));
    }
    state.advance();
  }
};

template <typename Config>
__device__ void produce_wide(BackwardProducer<Config> producer, WideTiles<Config> tiles) {
  constexpr int kBlockM = Config::kBlockM, kKeyRows = Config::kKeyRows;
  const BackwardParams& params = producer.params;
  const BackwardSchedule& schedule = producer.schedule;
  auto& shared = producer.shared;
  const int lane = producer.lane, rank = tiles.rank;
  TileScheduler scheduler(params.counters, schedule, KeyTiles<Config::kBlockN>{params, schedule},
                          blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster, lane);
  if (rank == 0) scheduler.begin();
  uint32_t count = 0;  // steps
  for (;;) {
    rank == 0 ? tiles.send(key_tile(schedule, scheduler.tile())) : tiles.expect();
    const Tile tile = tiles.look();
    if (tile.batch < 0) {
      producer.announce_end(count);
      return;
    }
    const KeyTileRange<Config> range(params, schedule, tile);
    StepIterator step = range.steps(params, schedule, tile);
    const int steps = step.left;
    ptx::wait_for_earlier_kernels();
    const Sequence& sequence = range.sequence;
    const int first_tile = dq_tile<kBlockM>(params, sequence, tile.batch);
    // Of the keys of the thread block `of_rank`. Each load ends before the next starts, so K and V
    // share a barrier for rows behind the sequence, and so do Q and dO.
    const auto load_keys = [&](auto cols, auto& pipeline, auto* target, const CUtensorMap& map,
                               int of_rank, int first_part) {
      const int begin = range.n_begin + of_rank * kKeyRows;
      const int valid_rows = max(sequence.seqlen_k - begin, 0);
      pipeline.wait_empty(tiles.keys);
      producer.template load<kKeyRows, decltype(cols)::value>(
          kTailOfK, target, map, pipeline.full[0], sequence.k_batch, sequence.k_first, tile.head_kv,
          begin, valid_rows, schedule.clear_tail_k, {}, first_part);
      producer.template finish_load<decltype(cols)::value>(
          kTailOfK, target, pipeline.full[0], kKeyRows, valid_rows, schedule.clear_tail_k);
    };
    const auto finish_queries = [&](auto cols, auto& pipeline, auto* stages, auto state) {
      producer.template finish_load<decltype(cols)::value>(
          kTailOfQ, stages[state.stage()], pipeline.full[state.stage()], kBlockM,
          sequence.seqlen_q - step.m_block * kBlockM, schedule.clear_tail_q);
    };
    const std::integral_constant<int, Config::kHeadDim> cols{};
    const std::integral_constant<int, Config::kHeadDimV> cols_v{};
    const std::integral_constant<int, Config::kDqCols> cols_dq{};
    if (steps > 0) load_keys(cols, shared.k_pipeline, shared.k, producer.maps.k, rank, 0);
#pragma unroll 1
    for (bool first = true; step.left > 0; first = false, step.next(range.m_blocks)) {
      const PipelineState<Config::kStages> q_state{count};
      const PipelineState<Config::kDoutStages> dout_state{count};
      shared.q_pipeline.wait_empty(q_state);
      producer.announce(range, step, first_tile, q_state);  // in front of Q: consume_ds looks there
      producer.template load_queries<Config::kHeadDim>(
          kTailOfQ, shared.q_pipeline, q_state, shared.q, producer.maps.q, sequence, step,
          producer.statistics(step, first_tile, q_state));
      finish_queries(cols, shared.q_pipeline, shared.q, q_state);
      if (first) load_keys(cols_v, shared.v_pipeline, shared.v, producer.maps.v, rank, 0);
      producer.template load_queries<Config::kHeadDimV>(kTailOfQ, shared.dout_pipeline, dout_state,
                                                        shared.dout, producer.maps.dout, sequence,
                                                        step);
      finish_queries(cols_v, shared.dout_pipeline, shared.dout, dout_state);
      ++count;
      if (first) {
        load_keys(cols_dq, shared.peer_k_pipeline, shared.peer_k, producer.maps.k, 1 - rank,
                  first_dq_col<Config>(rank) / kBoxCols<typename Config::T>);
      }
    }
    tiles.next(steps);
    if (rank == 0) next_tile(scheduler, schedule);
  }
}

// ---- Probabilities and gradients ---------------------------------------------------------------

// Of a warp of 16 keys.
struct WideKeys {
  int rank, warp, lane;
  int first;  // of the warp, in the sequence
};

// Starts D += A B. a: operands in registers; b: a tile of kRows rows. At most 192 columns at once:
// with 512 threads ptxas refuses an instruction of 256.
template <typename T, int kRows, int kColTiles, int kSteps>
__device__ void start_accumulate(float (&d)[kColTiles][4], const uint32_t (&a)[kSteps][4],
                                 const T* b) {
  constexpr int kPieces = kColTiles > 24 ? 2 : 1, kTiles = kColTiles / kPieces;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    start_multiply_accumulate<T>(reinterpret_cast<float (&)[kTiles][4]>(d[i * kTiles]), a,
                                 MnMajor<T, kRows>(b, 0, i * kTiles * 8));
  }
}

template <typename Config>
__device__ void consume_scores(const BackwardParams& params, const BackwardSchedule& schedule,
                               float scale_log2, typename Config::SharedStorage& shared,
                               const Tile& tile, const KeyTileRange<Config>& range,
                               StepIterator step, const WideKeys& keys,
                               const WideTiles<Config>& tiles) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kHeadDimV = Config::kHeadDimV;
  constexpr int kSteps = kBlockM / kWgmmaDepth<T>;
  const int lane = keys.lane, thread = keys.warp * 32 + lane;
  float dv[1][kHeadDimV / 8][4] = {};
  const bool has_steps = warp_uniform_condition(step.left > 0);
  HeadOptions head(params, tile.batch, step.head);
  Operands<Config::kKSteps> k_operands;
  if (has_steps) {
    shared.k_pipeline.wait_full(tiles.keys);
    load_operands<T, Config::kKeyRows, Config::kKSteps>(k_operands, shared.k, keys.warp * kWarpRows,
                                                        lane);
  }
  uint32_t count = tiles.step_count;
#pragma unroll 1
  for (bool more = has_steps; more; ++count) {
    static_assert(Config::kStages == 2 && Config::kPStages == 2 && Config::kDoutStages <= 2);
    const int stage = warp_uniform_condition(count & 1) ? 1 : 0;
    const PipelineState<Config::kStages> q_state{count};
    const PipelineState<Config::kDoutStages> dout_state{count};
    const PipelineState<Config::kPStages> p_state{count};
    float p[1][kBlockM / 8][4];
    shared.q_pipeline.wait_full(q_state);
    start_mixed_multiply<T, Config::kHeadDim, Config::kKSteps>(
        p[0], k_operands, KMajor<T, Config::kKeyRows>(shared.k),
        KMajor<T, kBlockM>(shared.q[stage]));
    more = warp_uniform_condition(step.left > 1);
    float2 lse[kBlockM / 8];
    load_statistic(lse, shared.statistics[stage] + lane % 4 * 2);
    ptx::wgmma_wait<0>(p[0]);

    uint32_t p_operands[kSteps][4], curved_operands[kSteps][4];
    scores_to_probabilities<T, Config::kFull>(p, p_operands, params, range.mask, scale_log2, lse,
                                              head, step.m_block * kBlockM, keys.first, lane);
    pack_operands<T>(curved_operands, p);
    shared.q_pipeline.release(q_state, lane);
    shared.p_pipeline.wait_empty(p_state);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t (&x)[4] = curved_operands[k];
      shared.p[stage][k][thread] = make_uint4(x[0], x[1], x[2], x[3]);
    }
    arrive_of_warp(shared.p_pipeline.full[stage], lane);
    shared.dout_pipeline.wait_full(dout_state);
    const int dout_stage = Config::kDoutStages == 1 ? 0 : stage;
    start_accumulate<T, kBlockM>(dv[0], p_operands, shared.dout[dout_stage]);
    ptx::wgmma_wait<0>(dv[0]);
    shared.dout_pipeline.release(dout_state, lane);
    if (step.next(range.m_blocks) && more) head = {params, tile.batch, step.head};
  }
  if (has_steps) shared.k_pipeline.release(tiles.keys, lane);
  finish_gradient<Config, true>(params, schedule, tile, range.n_block,
                                keys.rank * Config::kWarps + keys.warp, dv, lane);
}

template <typename Config>
__device__ void consume_gradients(const BackwardParams& params, const BackwardSchedule& schedule,
                                  typename Config::SharedStorage& shared, const Tile& tile,
                                  const KeyTileRange<Config>& range, StepIterator step,
                                  const WideKeys& keys, const WideTiles<Config>& tiles) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kHeadDim;
  constexpr int kSteps = kBlockM / kWgmmaDepth<T>;
  const int lane = keys.lane, thread = keys.warp * 32 + lane;
  // See backward_kernel.cuh.
  const uint32_t ds_row = (lane / 16 * 8 + lane % 8) * kPartRowBytes;
  const uint32_t ds_chunk = ((keys.warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const uint32_t ds_target = shared_address(shared.ds[keys.rank]) + ds_row + ds_chunk;
  float dk[1][kHeadDim / 8][4] = {};
  const bool has_steps = warp_uniform_condition(step.left > 0);
  Operands<Config::kVSteps> v_operands;
  if (has_steps) {
    shared.v_pipeline.wait_full(tiles.keys);
    load_operands<T, Config::kKeyRows, Config::kVSteps>(v_operands, shared.v, keys.warp * kWarpRows,
                                                        lane);
  }
  uint32_t count = tiles.step_count;
#pragma unroll 1
  for (bool more = has_steps; more; ++count) {
    const int stage = warp_uniform_condition(count & 1) ? 1 : 0;
    const PipelineState<Config::kStages> q_state{count};
    const PipelineState<Config::kDoutStages> dout_state{count};
    const PipelineState<Config::kPStages> p_state{count};
    const int dout_stage = Config::kDoutStages == 1 ? 0 : stage;
    float ds[1][kBlockM / 8][4];
    shared.dout_pipeline.wait_full(dout_state);
    start_mixed_multiply<T, Config::kHeadDimV, Config::kVSteps>(
        ds[0], v_operands, KMajor<T, Config::kKeyRows>(shared.v),
        KMajor<T, kBlockM>(shared.dout[dout_stage]));
    more = warp_uniform_condition(step.left > 1);
    shared.q_pipeline.wait_full(q_state);
    float2 delta[kBlockM / 8];
    load_statistic(delta, shared.statistics[stage] + kBlockM + lane % 4 * 2);
    ptx::wgmma_wait<0>(ds[0]);
    shared.dout_pipeline.release(dout_state, lane);

    shared.p_pipeline.wait_full(p_state);
    uint32_t ds_operands[kSteps][4];
    {
      uint4 p[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) p[k] = shared.p[stage][k][thread];
      shared.p_pipeline.release(p_state, lane);
      with_condition<Config::kFull>(params.rng_state != nullptr, [&](auto drops) {
#pragma unroll
        for (int n = 0; n < kBlockM / 8; ++n) {
          const uint4 x = p[n / 2];
          const float2 low = unpack<T>(n % 2 == 0 ? x.x : x.z);
          const float2 high = unpack<T>(n % 2 == 0 ? x.y : x.w);
          differentiate_scores<drops>(ds[0][n], {low.x, low.y, high.x, high.y}, delta[n]);
        }
      });
    }
    pack_operands<T>(ds_operands, ds);
    wait(shared.ds_empty, count % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::stmatrix_x4_trans(ds_target + i * 16 * kPartRowBytes, ds_operands[i]);
    }
    start_accumulate<T, kBlockM>(dk[0], ds_operands, shared.q[stage]);
    arrive_of_warp(shared.ds_full, lane);
    ptx::wgmma_wait<0>(dk[0]);
    shared.q_pipeline.release(q_state, lane);
    step.next(range.m_blocks);
  }
  if (has_steps) shared.v_pipeline.release(tiles.keys, lane);
  finish_gradient<Config, false>(params, schedule, tile, range.n_block,
                                 keys.rank * Config::kWarps + keys.warp, dk, lane);
}

// ---- dQ ----------------------------------------------------------------------------------------

template <typename Config>
__device__ void consume_ds(typename Config::SharedStorage& shared, int steps, int warp,
                           const WideTiles<Config>& tiles,
                           PipelineState<Config::kDqStages>& dq_state) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kKeyRows = Config::kKeyRows;
  const int rank = tiles.rank, lane = tiles.lane;
  uint64_t* const peer_ds_empty = ptx::map_to_rank(&shared.ds_empty, 1 - rank);
  if (steps == 0) return;
  shared.k_pipeline.wait_full(tiles.keys);
  shared.peer_k_pipeline.wait_full(tiles.keys);
  const int first_col = first_dq_col<Config>(rank);
#pragma unroll 1
  for (uint32_t i = tiles.step_count; i != tiles.step_count + steps; ++i) {
    wait_for_stores(shared.ds_full, i % 2);
    const Range chunks =
        dq_chunks<Config>(rank, warp_uniform(shared.steps.slots[i % Config::kStepSlots].row_tile));
#pragma unroll 1
    for (int chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      constexpr int kTiles = Config::kDqChunkCols / 8;
      const int col = chunk * Config::kDqChunkCols;
      float dq[kTiles][4];
      start_multiply<T, kKeyRows>(dq, KMajor<T, kBlockM>(shared.ds[rank]),
                                  MnMajor<T, kKeyRows>(shared.k, 0, col));
      // While it runs, the other thread block's part may still come.
      if (chunk == chunks.begin) wait(shared.peer_ds_full, i % 2);
      start_multiply<T, kKeyRows, true>(dq, KMajor<T, kBlockM>(shared.ds[1 - rank]),
                                        MnMajor<T, kKeyRows>(shared.peer_k, 0, col - first_col));
      ptx::wgmma_wait<0>(dq);
      if (chunk == chunks.end - 1) {
        arrive_of_warp(shared.ds_empty, lane);
        if (lane < kArrivingLanes) ptx::arrive_in_cluster(peer_ds_empty);
      }
      shared.dq_pipeline.wait_empty(dq_state);
      float4* const target = shared.dq[dq_state.stage()] + warp * (kTiles * 32) + lane;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        target[n * 32] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
      }
      arrive_of_warp(shared.dq_pipeline.full_of(dq_state), lane);
      dq_state.advance();
    }
  }
  shared.k_pipeline.release(tiles.keys, lane);
  shared.peer_k_pipeline.release(tiles.keys, lane);
}

// Sends this thread block's part of dS to the other, by one lane.
template <typename Config>
__device__ void send_ds(typename Config::SharedStorage& shared, int steps,
                        const WideTiles<Config>& tiles) {
  const int rank = tiles.rank;
  constexpr int kBytes = sizeof(shared.ds[0]);
  void* const target = ptx::map_to_rank(&shared.ds[rank], 1 - rank);
  uint64_t* const peer_full = ptx::map_to_rank(&shared.peer_ds_full, 1 - rank);
#pragma unroll 1
  for (uint32_t i = tiles.step_count; i != tiles.step_count + steps; ++i) {
    // For what the other sends.
    wait(shared.peer_ds_full, i % 2 ^ 1);
    arrive_expecting(shared.peer_ds_full, kBytes);
    wait_for_stores(shared.ds_full, i % 2);
    ptx::copy_in_cluster(target, shared.ds[rank], kBytes, peer_full);
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

// Grid: as many clusters as fit the device, or as there are tiles; see prepare_backward.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ BackwardSchedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = ptx::cluster_rank();

  if (threadIdx.x == 32) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    ptx::prefetch_tensor_map(&maps.dout);
    shared.k_pipeline.init(2 * Config::kWarps);
    shared.v_pipeline.init(Config::kWarps);
    shared.peer_k_pipeline.init(Config::kWarps);
    shared.q_pipeline.init(2 * Config::kWarps);
    shared.dout_pipeline.init(2 * Config::kWarps);
    shared.p_pipeline.init(Config::kWarps, Config::kWarps);
    shared.dq_pipeline.init(1, Config::kWarps);
    shared.tiles.init(Config::kCluster * Config::kTileWarps);
    init_barrier(shared.ds_full, Config::kWarps);
    init_barrier(shared.peer_ds_full, 1);
    init_barrier(shared.ds_empty, Config::kCluster * Config::kWarps);
    shared.steps.init();
    for (uint64_t& barrier : shared.tail_full) init_barrier(barrier, 1);
    fence_barrier_init();
  }
  ptx::cluster_sync();
  if (schedule.lengths_on_device) ptx::wait_for_earlier_kernels();

  const int role = warp / Config::kWarps, role_warp = warp % Config::kWarps;
  WideTiles<Config> tiles{shared, rank, lane};
  // Of each tile: run(tile, range, steps).
  const auto for_each_tile = [&](auto run) {
    for (;;) {
      const Tile& tile = tiles.look();
      if (warp_uniform(tile.batch) < 0) return;
      const KeyTileRange<Config> range(params, schedule, tile);
      const StepIterator step = range.steps(params, schedule, tile);
      run(tile, range, step);
      tiles.next(step.left);
    }
  };
  if (role < 2) {
    ptx::setmaxnreg_inc<Config::kGradientRegisters>();
    for_each_tile([&](const Tile& tile, const KeyTileRange<Config>& range, StepIterator step) {
      const WideKeys keys{rank, role_warp, lane,
                          range.n_begin + rank * Config::kKeyRows + role_warp * 16};
      ptx::wait_for_earlier_kernels();
      if (role == 0) {
        consume_scores<Config>(params, schedule, scale_log2, shared, tile, range, step, keys,
                               tiles);
      } else {
        consume_gradients<Config>(params, schedule, shared, tile, range, step, keys, tiles);
      }
    });
  } else if (role == 2) {
    ptx::setmaxnreg_dec<Config::kDqRegisters>();
    PipelineState<Config::kDqStages> dq_state;
    for_each_tile([&](const Tile&, const KeyTileRange<Config>&, const StepIterator& step) {
      consume_ds<Config>(shared, warp_uniform(step.left), role_warp, tiles, dq_state);
    });
  } else {
    ptx::setmaxnreg_dec<Config::kHelperRegisters>();
    // Found again: ptxas would keep it in memory.
    const int helper = warp_uniform(threadIdx.x / 32) % Config::kWarps;
    if (helper == 0) {
      produce_wide(BackwardProducer<Config>{params, maps, schedule, shared, lane}, tiles);
      ptx::wait_for_earlier_kernels();
      ptx::let_next_kernel_start();  // when no tile is left: see backward_kernel
    } else if (helper == 1) {
      ptx::wait_for_earlier_kernels();
      for_each_tile([&](const Tile&, const KeyTileRange<Config>&, const StepIterator& step) {
        if (lane == 0) send_ds<Config>(shared, step.left, tiles);
      });
    } else {
      ptx::wait_for_earlier_kernels();
      const auto chunks_of = [&](int row_tile) { return dq_chunks<Config>(rank, row_tile); };
      if (lane == 0) add_dq<Config>(params, schedule, shared, chunks_of, helper - 2, rank);
    }
    __syncwarp();
  }
  // The other thread block may still write to this one's shared memory.
  ptx::cluster_sync();
}

}  // namespace flash::sm90
