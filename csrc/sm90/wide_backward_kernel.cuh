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
//   adder         one warp: has TMA add dQ to a float32 workspace
//
// dV and dK stay in registers. P^T goes from thread to thread in 16 bits: both warpgroups hold a
// tile of scores in the same way. What the warpgroups hand over is buffered, so that nobody runs in
// step with another.
#pragma once

#include <cuda.h>

#include "common/dropout.h"
#include "common/fragment.h"
#include "common/sequence.h"
#include "common/shared_address.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/griddepcontrol.h"
#include "ptx/prefetch.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/wgmma.h"
#include "sm90/add_dq.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_rows.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/split.cuh"
#include "sm90/store.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"
#include "sm90/wide_backward_config.cuh"

namespace flash::sm90 {

// ---- Producer ----------------------------------------------------------------------------------

template <typename Config>
__device__ void produce_wide(BackwardProducer<Config> producer, const Tile& tile, int rank) {
  constexpr int kBlockM = Config::kBlockM, kKeyRows = Config::kKeyRows;
  const BackwardParams& params = producer.params;
  const BackwardSchedule& schedule = producer.schedule;
  auto& shared = producer.shared;
  const int lane = producer.lane;
  const KeyTileRange<Config> range(params, schedule, tile);
  StepIterator step = range.steps(params, schedule, tile);
  ptx::wait_for_earlier_kernels();
  if (step.left == 0) return;
  const Sequence& sequence = range.sequence;
  const int first_tile = dq_tile<kBlockM>(params, sequence, tile.batch);
  // Of the keys of the thread block `of_rank`.
  const auto load_keys = [&](auto cols, auto* target, const CUtensorMap& map, uint64_t& full,
                             int of_rank, int first_part) {
    const int begin = range.n_begin + of_rank * kKeyRows;
    producer.template load<kKeyRows, decltype(cols)::value>(
        target, map, full, sequence.k_batch, sequence.k_first, tile.head_kv, begin,
        max(sequence.seqlen_k - begin, 0), schedule.clear_tail_k, {}, first_part);
  };
  PipelineState<Config::kStages> q_state;
  PipelineState<Config::kDoutStages> dout_state;
  const std::integral_constant<int, Config::kHeadDim> cols{};
  const std::integral_constant<int, Config::kHeadDimV> cols_v{};
  const std::integral_constant<int, Config::kDqCols> cols_dq{};
  load_keys(cols, shared.k, producer.maps.k, shared.k_full, rank, 0);
#pragma unroll 1
  for (bool first = true; step.left > 0; first = false, step.next(range.m_blocks)) {
    const BulkCopy statistics = producer.announce(range, step, first_tile, q_state);
    producer.template load_queries<Config::kHeadDim>(shared.q_pipeline, q_state, shared.q,
                                                     producer.maps.q, sequence, step, statistics);
    q_state.advance();
    if (first) load_keys(cols_v, shared.v, producer.maps.v, shared.v_full, rank, 0);
    producer.template load_queries<Config::kHeadDimV>(shared.dout_pipeline, dout_state, shared.dout,
                                                      producer.maps.dout, sequence, step);
    dout_state.advance();
    if (first) {
      load_keys(cols_dq, shared.peer_k, producer.maps.k, shared.peer_k_full, 1 - rank,
                rank * Config::kDqCols / kBoxCols<typename Config::T>);
    }
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

// Stores a warp's part of dK or dV, and if the tile's steps are divided, who is last stores the
// sum. place: of the warp among `places` of a tile
template <typename Config, int kTiles>
__device__ void store_gradient(const BackwardParams& params, const BackwardSchedule& schedule,
                               const Tile& tile, const Operand& target, int headdim,
                               const WideKeys& keys, float (&x)[1][kTiles][4], int place,
                               int64_t part_place) {
  using T = typename Config::T;
  bool is_last = true;
  if (schedule.splits > 1) {
    constexpr int kTileSize = Config::kBlockN * (Config::kHeadDim + Config::kHeadDimV) / 4;
    const int index = (tile.batch * schedule.heads + tile.head) * schedule.blocks + tile.block;
    float4* const parts = reinterpret_cast<float4*>(params.partial_dkv) +
                          (int64_t{1} * index * kTileSize + part_place) * schedule.splits;
    leave_part(parts + tile.part * (kTiles * 32), x, keys.lane);
    is_last = is_last_part(params.counters + 1 + index * Config::kConsumerWarps + place,
                           schedule.splits, keys.lane);
    if (is_last) {
      clear(x);
#pragma unroll 1
      for (int i = 0; i < schedule.splits; ++i) add_part(x, parts + i * (kTiles * 32), keys.lane);
    }
  }
  const Sequence sequence(params, tile.batch);
  T* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = keys.first + half * 8 + keys.lane / 4;
    rows[half] = is_last && key < sequence.seqlen_k
                     ? rows_of<T>(target, sequence.k_batch, sequence.k_first + key, tile.head_kv)
                     : nullptr;
  }
  store_accumulators<T, 4>(rows, headdim, x[0], keys.lane);
}

template <typename Config>
__device__ void consume_scores(const BackwardParams& params, const BackwardSchedule& schedule,
                               float scale_log2, typename Config::SharedStorage& shared,
                               const KeyTileRange<Config>& range, StepIterator step,
                               const WideKeys& keys) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kHeadDimV = Config::kHeadDimV;
  constexpr int kSteps = kBlockM / kWgmmaDepth<T>;
  const int lane = keys.lane, thread = keys.warp * 32 + lane;
  const Tile& tile = shared.tile;
  float dv[1][kHeadDimV / 8][4] = {};
  if (step.left > 0) wait(shared.k_full, 0);
  uint32_t count = 0;
#pragma unroll 1
  for (bool more = warp_uniform_condition(step.left > 0); more; ++count) {
    static_assert(Config::kStages == 2 && Config::kPStages == 2 && Config::kDoutStages <= 2);
    const int stage = warp_uniform_condition(count & 1) ? 1 : 0;
    const PipelineState<Config::kStages> q_state{count};
    const PipelineState<Config::kDoutStages> dout_state{count};
    const PipelineState<Config::kPStages> p_state{count};
    float p[1][kBlockM / 8][4];
    shared.q_pipeline.wait_full(q_state);
    start_multiply<T, Config::kHeadDim>(p[0], KMajor<T, Config::kKeyRows>(shared.k),
                                        KMajor<T, kBlockM>(shared.q[stage]));
    more = warp_uniform_condition(step.left > 1);
    float2 lse[kBlockM / 8];
    load_statistic(lse, shared.statistics[stage] + lane % 4 * 2);
    ptx::wgmma_wait<0>(p[0]);

    float derivative[1][Config::kFull ? kBlockM / 8 : 1][4];  // of the score transform
    const bool curved =
        transform_scores<Config::kFull>(p, derivative, params, range.mask, tile.batch, step.head,
                                        step.m_block * kBlockM, keys.first, lane);
    exponentiate(p, lse, scale_log2);
    shared.q_pipeline.release(q_state, lane);

    uint32_t p_operands[kSteps][4];
    pack_operands<T>(p_operands, p);
    const auto hand_over = [&](const uint32_t (&x)[kSteps][4]) {
      shared.p_pipeline.wait_empty(p_state);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        shared.p[stage][k][thread] = make_uint4(x[k][0], x[k][1], x[k][2], x[k][3]);
      }
      arrive_of_warp(shared.p_pipeline.full[stage], lane);
    };
    if (!curved) hand_over(p_operands);
    if constexpr (Config::kFull) {
      if (curved) {
        uint32_t curved_operands[kSteps][4];
        float x[1][kBlockM / 8][4];
        for_each(x, [&](float& y, int m, int n, int j) { y = p[m][n][j] * derivative[m][n][j]; });
        pack_operands<T>(curved_operands, x);
        hand_over(curved_operands);
      }
      if (params.rng_state != nullptr) {
        const Dropout dropout(params, tile.batch, step.head);
        const uint32_t kept =
            kept_bits<kBlockM / 8>(dropout, step.m_block * kBlockM / 16, keys.first / 16, lane);
        for_each(p, [&](float& x, int, int n, int j) { x = kept >> (n * 4 + j) & 1 ? x : 0.f; });
        pack_operands<T>(p_operands, p);
      }
    }
    shared.dout_pipeline.wait_full(dout_state);
    const int dout_stage = Config::kDoutStages == 1 ? 0 : stage;
    start_accumulate<T, kBlockM>(dv[0], p_operands, shared.dout[dout_stage]);
    ptx::wgmma_wait<0>(dv[0]);
    shared.dout_pipeline.release(dout_state, lane);
    step.next(range.m_blocks);
  }
  if (Config::kFull && params.rng_state != nullptr) scale_by(dv, params.dropout_scale);
  const int place = keys.rank * Config::kWarps + keys.warp;
  store_gradient<Config>(params, schedule, tile, params.dv, params.headdim_v, keys, dv, place,
                         place * (kHeadDimV / 8 * 32));
}

template <typename Config>
__device__ void consume_gradients(const BackwardParams& params, const BackwardSchedule& schedule,
                                  typename Config::SharedStorage& shared,
                                  const KeyTileRange<Config>& range, StepIterator step,
                                  const WideKeys& keys) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kHeadDim;
  constexpr int kSteps = kBlockM / kWgmmaDepth<T>;
  const int lane = keys.lane, thread = keys.warp * 32 + lane;
  const Tile& tile = shared.tile;
  // See backward_kernel.cuh.
  const uint32_t ds_row = (lane / 16 * 8 + lane % 8) * kPartRowBytes;
  const uint32_t ds_chunk = ((keys.warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const uint32_t ds_target = shared_address(shared.ds[keys.rank]) + ds_row + ds_chunk;
  float dk[1][kHeadDim / 8][4] = {};
  if (step.left > 0) wait(shared.v_full, 0);
  uint32_t count = 0;
#pragma unroll 1
  for (bool more = warp_uniform_condition(step.left > 0); more; ++count) {
    const int stage = warp_uniform_condition(count & 1) ? 1 : 0;
    const PipelineState<Config::kStages> q_state{count};
    const PipelineState<Config::kDoutStages> dout_state{count};
    const PipelineState<Config::kPStages> p_state{count};
    const int dout_stage = Config::kDoutStages == 1 ? 0 : stage;
    float ds[1][kBlockM / 8][4];
    shared.dout_pipeline.wait_full(dout_state);
    start_multiply<T, Config::kHeadDimV>(ds[0], KMajor<T, Config::kKeyRows>(shared.v),
                                         KMajor<T, kBlockM>(shared.dout[dout_stage]));
    more = warp_uniform_condition(step.left > 1);
    shared.q_pipeline.wait_full(q_state);
    float2 delta[kBlockM / 8];
    load_statistic(delta, shared.statistics[stage] + kBlockM + lane % 4 * 2);
    ptx::wgmma_wait<0>(ds[0]);
    shared.dout_pipeline.release(dout_state, lane);

    if constexpr (Config::kFull) {
      if (params.rng_state != nullptr) {
        const Dropout dropout(params, tile.batch, step.head);
        const uint32_t kept =
            kept_bits<kBlockM / 8>(dropout, step.m_block * kBlockM / 16, keys.first / 16, lane);
        for_each(ds, [&](float& x, int, int n, int j) {
          x = kept >> (n * 4 + j) & 1 ? x * dropout.scale : 0.f;
        });
      }
    }
    shared.p_pipeline.wait_full(p_state);
    uint32_t ds_operands[kSteps][4];
    {
      float p[1][kBlockM / 8][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint4 x = shared.p[stage][k][thread];
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = unpack<T>(words[i]);
          p[0][2 * k + i / 2][i % 2 * 2] = pair.x;
          p[0][2 * k + i / 2][i % 2 * 2 + 1] = pair.y;
        }
      }
      shared.p_pipeline.release(p_state, lane);
      differentiate_scores(ds, p, delta);
    }
    pack_operands<T>(ds_operands, ds);
    wait(shared.ds_empty, count % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::stmatrix_x4_trans(ds_target + i * 16 * kPartRowBytes, ds_operands[i]);
    }
    start_accumulate<T, kBlockM>(dk[0], ds_operands, shared.q[stage]);
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    arrive_of_warp(shared.ds_full, lane);
    ptx::wgmma_wait<0>(dk[0]);
    shared.q_pipeline.release(q_state, lane);
    step.next(range.m_blocks);
  }
  scale_by(dk, params.softmax_scale);
  const int place = keys.rank * Config::kWarps + keys.warp;
  store_gradient<Config>(params, schedule, tile, params.dk, params.headdim, keys, dk,
                         Config::kCluster * Config::kWarps + place,
                         Config::kBlockN * Config::kHeadDimV / 4 + place * (kHeadDim / 8 * 32));
}

// ---- dQ ----------------------------------------------------------------------------------------

// Of a thread block's columns of dQ: the last ones may lie behind the head dim.
template <typename Config>
__device__ int dq_chunks(int rank) {
  return min(Config::kDqCols, Config::kHeadDim - rank * Config::kDqCols) / Config::kDqChunkCols;
}

template <typename Config>
__device__ void consume_ds(typename Config::SharedStorage& shared, int step_count, int rank,
                           int warp, int lane) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kKeyRows = Config::kKeyRows;
  uint64_t* const peer_ds_empty = ptx::map_to_rank(&shared.ds_empty, 1 - rank);
  PipelineState<Config::kDqStages> dq_state;
  const int chunks = warp_uniform(dq_chunks<Config>(rank));
  if (step_count > 0) {
    wait(shared.k_full, 0);
    wait(shared.peer_k_full, 0);
  }
  // What a warp has stored is handed over beside the next product: then the fence need not wait for
  // the stores.
  const auto hand_over = [&] {
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    arrive_of_warp(shared.dq_pipeline.full[dq_state.stage()], lane);
    dq_state.advance();
  };
#pragma unroll 1
  for (int i = 0; i < step_count; ++i) {
    wait(shared.ds_full, i % 2);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      constexpr int kTiles = Config::kDqChunkCols / 8;
      const int col = chunk * Config::kDqChunkCols;
      float dq[kTiles][4];
      start_multiply<T, kKeyRows>(dq, KMajor<T, kBlockM>(shared.ds[rank]),
                                  MnMajor<T, kKeyRows>(shared.k, 0, rank * Config::kDqCols + col));
      if (i + chunk > 0) hand_over();
      // While it runs, the other thread block's part may still come.
      if (chunk == 0) wait(shared.peer_ds_full, i % 2);
      start_multiply<T, kKeyRows, true>(dq, KMajor<T, kBlockM>(shared.ds[1 - rank]),
                                        MnMajor<T, kKeyRows>(shared.peer_k, 0, col));
      ptx::wgmma_wait<0>(dq);
      if (chunk == chunks - 1) {
        arrive_of_warp(shared.ds_empty, lane);
        if (lane == 0) ptx::arrive_in_cluster(peer_ds_empty);
      }
      shared.dq_pipeline.wait_empty(dq_state);
      float4* const target = shared.dq[dq_state.stage()] + warp * (kTiles * 32) + lane;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        target[n * 32] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
      }
    }
  }
  if (step_count > 0) hand_over();
}

// Sends this thread block's part of dS to the other, by one lane.
template <typename Config>
__device__ void send_ds(typename Config::SharedStorage& shared, int step_count, int rank) {
  constexpr int kBytes = sizeof(shared.ds[0]);
  void* const target = ptx::map_to_rank(&shared.ds[rank], 1 - rank);
  uint64_t* const peer_full = ptx::map_to_rank(&shared.peer_ds_full, 1 - rank);
#pragma unroll 1
  for (int i = 0; i < step_count; ++i) {
    // For what the other sends.
    wait(shared.peer_ds_full, i % 2 ^ 1);
    arrive_expecting(shared.peer_ds_full, kBytes);
    wait(shared.ds_full, i % 2);
    ptx::copy_in_cluster(target, shared.ds[rank], kBytes, peer_full);
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

// Grid: a cluster for each tile, or more; see launch_backward. params.window_left and window_right
// are bounded_window's.
template <typename Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ BackwardSchedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = ptx::cluster_rank();
  if (schedule.lengths_on_device) ptx::wait_for_earlier_kernels();

  if (warp == 0) {
    const int cluster = blockIdx.x / Config::kCluster, clusters = gridDim.x / Config::kCluster;
    TileScheduler scheduler(params.counters, schedule, KeyTiles<Config::kBlockN>{params}, cluster,
                            clusters, lane);
    const Tile tile = scheduler.tile();
    if (lane == 0) shared.tile = tile;
  }
  if (threadIdx.x == 32) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    ptx::prefetch_tensor_map(&maps.dout);
    init_barrier(shared.k_full, 1);
    init_barrier(shared.v_full, 1);
    init_barrier(shared.peer_k_full, 1);
    shared.q_pipeline.init(2 * Config::kWarps);
    shared.dout_pipeline.init(2 * Config::kWarps);
    for (int i = 0; i < Config::kPStages; ++i) {
      init_barrier(shared.p_pipeline.full[i], Config::kWarps);
      init_barrier(shared.p_pipeline.empty[i], Config::kWarps);
    }
    for (int i = 0; i < Config::kDqStages; ++i) {
      init_barrier(shared.dq_pipeline.full[i], Config::kWarps);
      init_barrier(shared.dq_pipeline.empty[i], 1);
    }
    init_barrier(shared.ds_full, Config::kWarps);
    init_barrier(shared.peer_ds_full, 1);
    init_barrier(shared.ds_empty, Config::kCluster * Config::kWarps);
    init_barrier(shared.tail_full, 1);
    fence_barrier_init();
  }
  ptx::cluster_sync();
  const Tile& tile = shared.tile;
  // The same for both thread blocks of a cluster.
  if (tile.batch < 0) return;

  const int role = warp / Config::kWarps, role_warp = warp % Config::kWarps;
  if (role < 2) {
    ptx::setmaxnreg_inc<Config::kGradientRegisters>();
    const KeyTileRange<Config> range(params, schedule, tile);
    const StepIterator step = range.steps(params, schedule, tile);
    const WideKeys keys{rank, role_warp, lane,
                        range.n_begin + rank * Config::kKeyRows + role_warp * 16};
    ptx::wait_for_earlier_kernels();
    if (role == 0) {
      consume_scores<Config>(params, schedule, scale_log2, shared, range, step, keys);
    } else {
      consume_gradients<Config>(params, schedule, shared, range, step, keys);
    }
  } else if (role == 2) {
    ptx::setmaxnreg_dec<Config::kDqRegisters>();
    const KeyTileRange<Config> range(params, schedule, tile);
    consume_ds<Config>(shared, warp_uniform(range.steps(params, schedule, tile).left), rank,
                       role_warp, lane);
  } else {
    ptx::setmaxnreg_dec<Config::kHelperRegisters>();
    ptx::wait_for_earlier_kernels();
    if (role_warp == 0) {
      produce_wide(BackwardProducer<Config>{params, maps, schedule, shared, lane, {}}, tile, rank);
    } else {
      const KeyTileRange<Config> range(params, schedule, tile);
      const int step_count = range.steps(params, schedule, tile).left;
      if (role_warp == 1 && lane == 0) {
        constexpr int kChunks = Config::kDqCols / Config::kDqChunkCols;
        add_dq<Config>(params, shared, step_count, rank * kChunks, dq_chunks<Config>(rank), rank);
      }
      if (role_warp == 2 && lane == 0) send_ds<Config>(shared, step_count, rank);
      if (role_warp == 3) ptx::let_next_kernel_start();
      __syncwarp();
    }
  }
  // The other thread block may still write to this one's shared memory.
  ptx::cluster_sync();
}

}  // namespace flash::sm90
