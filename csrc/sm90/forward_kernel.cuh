// Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// Thread blocks stay on their SM and take tile after tile. Their warps have roles:
//
//   scheduler  one warp: finds the next tile
//   producers  two warps: have TMA load Q of the tile and its blocks of keys, and those of values
//   consumers  two or three warpgroups: own 64 queries each, scores and output in registers
//
// The causal or window mask: TileRange (tile_range.cuh) takes the blocks of keys that some query
// sees, `mask_scores` in `consume` hides the single keys (common/mask.h). Blocks are taken from the
// last to the first; with ALiBi they start at the diagonal (key_blocks.cuh).
// Where a tile needs few registers, a thread block works on two streams of tiles
// (forward_tile.h). Each has its own consumers, and one warp that schedules and loads.
// A warp that would be idle clears the rows of no sequence.
//
// NaN or Inf outside a sequence never reaches its result; of keys inside it that the mask hides
// from a query the same is said as in sm80/forward_kernel.cuh.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common/dropout.h"
#include "common/gaps.h"
#include "common/mask.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/opaque.h"
#include "ptx/prefetch.h"
#include "ptx/setmaxnreg.h"
#include "ptx/wgmma.h"
#include "sm90/forward_config.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/quantised_consumer.cuh"
#include "sm90/softmax.cuh"
#include "sm90/store.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/tma_load.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// ---- Scheduler ---------------------------------------------------------------------------------

// Tiles are blocks of queries: how many each sequence has, for the scheduler.
struct QueryBlocks {
  const ForwardParams& params;
  const ForwardSchedule& schedule;

  __device__ bool packed() const { return params.cu_seqlens_q != nullptr; }
  __device__ int batch() const { return params.batch; }
  __device__ int of_sequence(int batch) const {
    return (Sequence(params, batch).seqlen_q + schedule.rows - 1) / schedule.rows;
  }
  __device__ bool mixed() const { return schedule.mixed; }
  __device__ bool together() const { return schedule.together; }
  __device__ static constexpr bool all_drawn() { return false; }
  __device__ static constexpr int run() { return 1; }
  __device__ static constexpr int missing(const Tile&) { return 0; }
};

// The ticket that a stream of a thread block starts with.
template <typename Config>
__device__ int first_ticket(const ForwardSchedule& schedule, int stream) {
  return stream * gridDim.x + blockIdx.x + (Config::kDivided ? schedule.whole : 0);
}

// Who has a part of a tile draws no other.
template <typename Config, typename Scheduler>
__device__ void draw_next(Scheduler& scheduler) {
  if constexpr (Config::kDivided) {
    scheduler.finish();
  } else {
    scheduler.next();
  }
}

template <typename Config>
__device__ void distribute_tiles(const ForwardParams& params, const ForwardSchedule& schedule,
                                 typename Config::SharedStorage& shared, int lane) {
  TileScheduler scheduler(params.counters, schedule, QueryBlocks{params, schedule},
                          first_ticket<Config>(schedule, 0), gridDim.x, lane);
  TileState<Config> tile_state;
  PipelineState<1> wanted_state;
  // There is room for the next tile's keys: whoever is done first shall have it.
  const auto wait_until_wanted = [&] {
    wait(shared.tile_wanted, wanted_state.phase());
    wanted_state.advance();
  };
  for (bool is_first = true;; is_first = false, draw_next<Config>(scheduler)) {
    const Tile tile = scheduler.tile();
    if (schedule.draw_early && !is_first) wait_until_wanted();
    if constexpr (std::is_same_v<typename Config::Sent, Tile>) {
      shared.tiles.send(tile, tile_state, lane);
    } else {
      shared.tiles.send(tile_state, lane, [&](auto& slot) { slot.set(params, schedule, tile); });
    }
    if (tile.batch < 0) return;
    if (!schedule.draw_early) wait_until_wanted();
  }
}

// ---- Producers ---------------------------------------------------------------------------------

// A warp that loads: how far it is in each pipeline that it fills.
template <typename Config>
struct Producer {
  using T = typename Config::T;

  const typename Config::Params& params;
  const ForwardMaps& maps;
  const ForwardSchedule& schedule;
  typename Config::SharedStorage& shared;
  const int lane;
  PipelineState<Config::kStages> k_state;
  PipelineState<Config::kStages> v_state;
  PipelineState<Config::kQStages> q_state;
  PipelineState<1> tail_state;

  __device__ void load_k(const Tile& tile, const Sequence& sequence, int n) {
    if constexpr (Config::kScaled) {
      const BlockScales scales = block_scales<Config::kScaledValues>(params, sequence, tile, n);
      shared.k_pipeline.wait_empty(k_state);
      if (lane == 0) shared.scales[k_state.stage()] = scales;
    } else {
      shared.k_pipeline.wait_empty(k_state);
    }
    load_keys<Config::kHeadDim>(shared.k[k_state.stage()], maps.k,
                                shared.k_pipeline.full[k_state.stage()], tile, sequence, n);
    k_state.advance();
  }

  __device__ void load_v(const Tile& tile, const Sequence& sequence, int n) {
    shared.v_pipeline.wait_empty(v_state);
    if constexpr (Config::kTransposes) {
      load_squares(tile, sequence, n);
      v_state.advance();
      return;
    }
    if constexpr (Config::kQuantisedValues) {
      load_transposed_v(tile, sequence, n);
      v_state.advance();
      return;
    }
    const int valid_rows = sequence.seqlen_k - n;
    const bool clear = schedule.clear_tail && valid_rows < Config::kBlockN;
    uint64_t& full = shared.v_pipeline.full[v_state.stage()];
    auto* const v = shared.v[v_state.stage()];
    load_keys<Config::kHeadDimV>(v, maps.v, clear ? shared.tail_full : full, tile, sequence, n);
    if (clear) {
      wait(shared.tail_full, tail_state.phase());
      tail_state.advance();
      clear_tail<Config::kHeadDimV>(v, Config::kBlockN, valid_rows, lane);
      arrive_of_warp(full, lane);
    }
    v_state.advance();
  }

  // One box holds the rows of all heads of the tile: a lane takes a part of it. (What consumers
  // load themselves shall be in the L2 cache then.)
  __device__ void load_q(const Tile& tile, const Sequence& sequence, int m_begin) {
    if constexpr (Config::kScaled) {
      using Query = typename Config::Query;
      if (lane < kParts<Query, Config::kHeadDim>) {
        ptx::prefetch_box(&maps.q, ptx::opaque(lane) * kBoxCols<Query>,
                          schedule.head_of_group(tile), sequence.q_first + m_begin, tile.head_kv,
                          sequence.q_batch);
      }
      return;
    }
    const int stage = q_state.stage();
    shared.q_pipeline.wait_empty(q_state);
    q_state.advance();
    uint64_t& full = shared.q_pipeline.full[stage];
    constexpr int kQParts = kParts<T, Config::kHeadDim>;
    if (lane == 0) arrive_expecting(full, schedule.rows * schedule.group * kQParts * kPartRowBytes);
    __syncwarp();
    if (lane < kQParts) {
      const int part = ptx::opaque(lane);
      load_box(shared.q[stage] + lane * Config::kBlockM * kBoxCols<T>, maps.q, full, part,
               schedule.head_of_group(tile), sequence.q_first + m_begin, tile.head_kv,
               sequence.q_batch);
    }
  }

 private:
  __device__ void load_transposed_v(const Tile& tile, const Sequence& sequence, int n) {
    auto& v = shared.v[v_state.stage()];
    uint64_t& full = shared.v_pipeline.full[v_state.stage()];
    if (lane != 0) return;
    arrive_expecting(full, sizeof(v));
    const int place = first_scaled_block(params, sequence, tile.batch) * kScaledKeys + n;
    load_columns(v, maps.v, full, place, 0, tile.head_kv, sequence.k_batch);
  }

  // A lane takes a square of 64 keys and columns.
  __device__ void load_squares(const Tile& tile, const Sequence& sequence, int n) {
    constexpr int kSquaresOfKeys = Config::kHeadDimV / kSquareRows;
    auto& v = shared.v[v_state.stage()];
    uint64_t& full = shared.rows_full[v_state.stage()];
    if (lane == 0) arrive_expecting(full, sizeof(v));
    __syncwarp();
    if (lane < sizeof(v) / kSquareBytes) {
      const int square = ptx::opaque(lane);
      load_columns(v + square * kSquareBytes, maps.v, full, square % kSquaresOfKeys * kSquareRows,
                   sequence.k_first + n + square / kSquaresOfKeys * kSquareRows, tile.head_kv,
                   sequence.k_batch);
    }
  }

  template <int kCols, typename Element>
  __device__ void load_keys(Element* block, const CUtensorMap& map, uint64_t& full,
                            const Tile& tile, const Sequence& sequence, int n) {
    const BlockTable table{params.block_table, params.block_table_stride, schedule.page_size,
                           params.slots_k, params.seqlen_k};
    const SequenceRows rows{sequence.k_batch, tile.batch, sequence.k_first, tile.head_kv, table};
    load_rows<Config::kBlockN, kCols>(block, map, full, rows, n, schedule.key_box_rows, lane);
  }
};

// Loads Q of each tile and its keys, block by block, and wants the next tile when the last of them
// are loaded. Q comes behind the first keys, which need not wait for the last tile to be done.
template <typename Config>
__device__ void produce_keys(Producer<Config> producer) {
  auto& shared = producer.shared;
  const int lane = producer.lane;
  TileState<Config> tile_state;
  for (;;) {
    const typename Config::Sent tile = shared.tiles.receive(tile_state, lane);
    if (tile.batch < 0) break;
    const auto range = range_of<Config>(producer.params, producer.schedule, tile);
    wait_for_earlier_kernels<Config>(producer.schedule);
    if (range.blocks.empty()) arrive_of_warp(shared.tile_wanted, lane);
    [[maybe_unused]] int before = 0;
    range.blocks.for_each([&](const auto& block) {
      producer.load_k(tile, range.sequence, block.key());
      if (block.is_last()) arrive_of_warp(shared.tile_wanted, lane);
      if (block.is_first()) producer.load_q(tile, range.sequence, range.m_begin);
      if constexpr (Config::kTwoTranspose) {
        // Values are wanted a step later than keys.
        if (!block.is_first()) producer.load_v(tile, range.sequence, before);
        before = block.key();
        if (block.is_last()) producer.load_v(tile, range.sequence, before);
      }
    });
  }
}

// Loads the values of the same blocks.
template <typename Config>
__device__ void produce_values(Producer<Config> producer) {
  TileState<Config> tile_state;
  for (;;) {
    const typename Config::Sent tile = producer.shared.tiles.receive(tile_state, producer.lane);
    if (tile.batch < 0) break;
    const auto range = range_of<Config>(producer.params, producer.schedule, tile);
    wait_for_earlier_kernels<Config>(producer.schedule);
    range.blocks.for_each(
        [&](const auto& block) { producer.load_v(tile, range.sequence, block.key()); });
  }
}

// Transposes the values of the same blocks: square `number`, and that kTransposers behind it.
template <typename Config>
__device__ void transpose_values(const ForwardParams& params, const ForwardSchedule& schedule,
                                 typename Config::SharedStorage& shared, int number, int lane) {
  constexpr int kSquaresOfKeys = Config::kHeadDimV / kSquareRows;
  const SquareTransposer transposer(lane);
  PipelineState<Config::kStages> state;
  TileState<Config> tile_state;
  for (;;) {
    const typename Config::Sent& tile = shared.tiles.look(tile_state);
    if (tile.batch < 0) break;
    const auto& range = range_of<Config>(params, schedule, tile);
    const auto blocks = range.blocks;
    const int seqlen_k = range.sequence.seqlen_k;
    shared.tiles.release(tile_state, lane);
    tile_state.advance();
    blocks.for_each([&](const auto& block) {
      const int stage = state.stage();
      wait(shared.rows_full[stage], state.phase());
      __syncwarp();
      const int rows = seqlen_k - block.key();
      const bool clear = schedule.clear_tail && rows < Config::kBlockN;
      auto* const v = shared.v[stage] + number * kSquareBytes;
      constexpr int kStep = Config::kTransposers;
      if (clear) {
        for (int i = 0; i < 2 * kStep; i += kStep) {
          clear_rows(v + i * kSquareBytes, rows - (number + i) / kSquaresOfKeys * kSquareRows,
                     lane);
        }
      }
      transposer.transpose_two<kStep * kSquareBytes>(shared_address(v));
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
      arrive_of_warp(shared.v_pipeline.full[stage], lane);
      state.advance();
    });
  }
}

// The work of all three in one warp.
template <typename Config>
__device__ void produce_all(Producer<Config> producer, int stream) {
  TileScheduler scheduler(
      producer.params.counters, producer.schedule, QueryBlocks{producer.params, producer.schedule},
      first_ticket<Config>(producer.schedule, stream), Config::kStreams * gridDim.x, producer.lane);
  TileState<Config> tile_state;
  for (;; draw_next<Config>(scheduler)) {
    const Tile tile = scheduler.tile();
    producer.shared.tiles.send(tile, tile_state, producer.lane);
    if (tile.batch < 0) return;
    const typename Config::Range range(producer.params, producer.schedule, tile);
    wait_for_earlier_kernels<Config>(producer.schedule);
    range.blocks.for_each([&](const auto& block) {
      producer.load_k(tile, range.sequence, block.key());
      if (block.is_first()) producer.load_q(tile, range.sequence, range.m_begin);
      producer.load_v(tile, range.sequence, block.key());
    });
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

template <typename Config>
__device__ void consume(const ForwardParams& params, const ForwardSchedule& schedule,
                        float scale_log2, typename Config::SharedStorage& shared, int warpgroup) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kBlockN = Config::kBlockN;
  // Where all of Q is in registers, its stage is free at once. Else, with one stage, the next
  // tile's is waited for; with more it costs less after the loop.
  constexpr bool kReleaseQEarly = Config::kQStages == 1 && !Config::kQInRegisters;
  constexpr bool kReleaseQLate = Config::kQStages > 1 && !Config::kQInRegisters;
  // Beside the last matmul, or behind it. Code that does it at several places would spill with two
  // streams, whose warps have few registers; with the full set it is slower.
  constexpr bool kFinishEarly = Config::kStreams == 1 && !kFull && !Config::kDivided;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int first_row = warpgroup * kWarpgroupRows + thread / 32 * 16 + lane / 4;  // and + 8

  const Turns<Config> turns(warpgroup);

  Consumer<Config> consumer{shared, warpgroup, lane};
  auto& kv_state = consumer.kv_state;
  float scores[1][kBlockN / 8][4];
  typename Consumer<Config>::Queries q;
  const auto query_of = [&](int row) { return schedule.query_of(row); };
  const int first_query = query_of(warpgroup * kWarpgroupRows);
  const int last_query = query_of(warpgroup * kWarpgroupRows + kWarpgroupRows - 1);
  for (;;) {
    const Tile tile = consumer.receive_tile();
    if (tile.batch < 0) break;
    const typename Config::Range range(params, schedule, tile);
    // Of the warpgroup's queries, one sees keys up to seen_end, all see all_begin .. all_end - 1.
    const bool has_queries = warp_uniform(range.m_begin + first_query) < range.m_end;
    const int first = range.position + first_query, last = range.position + last_query;
    const int seen_end = has_queries ? range.mask.end_key(last) : 0;
    const int all_begin = range.mask.first_key(last), all_end = range.mask.end_key(first);

    float out[1][Config::kHeadDimV / 8][4] = {};
    wait_for_earlier_kernels<Config>(schedule);
    float sinks[2] = {-INFINITY, -INFINITY};
    if (params.s_aux != nullptr && tile.part == 0) {
      sinks[0] = params.s_aux[schedule.head_of(tile.head, first_row)];
      sinks[1] = params.s_aux[schedule.head_of(tile.head, first_row + 8)];
    }
    SoftmaxState<1> softmax(scale_log2, sinks, lane % 4 == 0);
    const ScoreTransform transform(params, tile.batch, tile.head, range.mask.shift);
    const Dropout dropout(params, tile.batch, tile.head);
    uint32_t p[kBlockN / kWgmmaDepth<T>][4];
    const auto softmax_block = [&](auto first, int n) {
      constexpr bool kFirst = decltype(first)::value;
      const int key = n + lane % 4 * 2;
      const int row = ptx::opaque(range.position);  // or what follows would occupy registers
      const auto mask_scores = [&] {
        if (n + kBlockN <= all_end && n >= all_begin) return;
        const auto row_of = [&](int, int half) { return row + query_of(first_row + half * 8); };
        apply_mask(scores, range.mask, row_of, key);
      };
      if constexpr (kFull) {
        transform.apply(scores, row + first_row, key, mask_scores, [](int, int, int, float) {});
      }
      mask_scores();
      if (kFull && dropout.enabled) {
        softmax_step<T, kFirst>(p, softmax, scores, out, lane, [&](int i, int lane) {
          return dropout.dropped((range.m_begin + first_row) / 16, n / 16 + i, lane);
        });
      } else {
        softmax_step<T, kFirst>(p, softmax, scores, out, lane,
                                [](int, int) { return NothingDropped(); });
      }
    };

    Epilogue<Config> epilogue;
    const auto scale = [&] { return kFull && dropout.enabled ? dropout.scale : 1.f; };
    const auto finish_softmax = [&] {
      epilogue.finish_softmax(params, schedule, tile, softmax, scale(), first_row, lane);
    };

    auto block = range.blocks;
    bool more = !block.empty();
    // Around a diagonal a warpgroup may see none of the first blocks. Without queries it sees none.
    while (more && block.key() >= seen_end) {
      more = !block.is_last();
      consumer.skip_block(!more);
      turns.take();
      turns.pass();
      block.advance();
    }
    if (more) {
      consumer.wait_for_q();
      consumer.wait_for_k(kv_state);
      consumer.load_q(q);
      if (Config::kQInRegisters) consumer.release_q();
      turns.take();
      consumer.begin_scores(scores, q, kv_state);
      turns.pass();
      ptx::wgmma_wait<0>(scores[0]);
      consumer.release_k(kv_state);
      if (kReleaseQEarly && block.is_last()) consumer.release_q();
      softmax_block(std::true_type(), block.key());
      // Each step: the scores of the next block of keys, and the output of this one.
      while (!block.is_last()) {
        block.advance();
        consumer.wait_for_v();
        consumer.wait_for_k(kv_state.next());
        turns.take();
        consumer.begin_scores(scores, q, kv_state.next());
        consumer.begin_output(out, p);
        turns.pass();
        ptx::wgmma_wait<1>(scores[0]);
        consumer.release_k(kv_state.next());
        if (kReleaseQEarly && block.is_last()) consumer.release_q();
        ptx::wgmma_wait<0>(out[0]);
        consumer.release_v();
        kv_state.advance();
        softmax_block(std::false_type(), block.key());
      }
      if (kReleaseQLate) consumer.release_q();
      consumer.wait_for_v();
      turns.take();
      consumer.begin_output(out, p);
      turns.pass();
      if (kFinishEarly) finish_softmax();
      ptx::wgmma_wait<0>(out[0]);
      consumer.release_v();
      kv_state.advance();
    } else {
      turns.take();  // each warpgroup has one turn more than there are blocks
      turns.pass();
      if (kFinishEarly) finish_softmax();
    }
    if constexpr (Config::kDivided) {
      merge_tile<Config>(params, schedule, tile, shared.part, softmax, out, scale(), first_row,
                         lane);
      return;
    }
    if (!kFinishEarly) finish_softmax();
    epilogue.store_output(params, out, lane);
    if (!block.empty()) consumer.q_state.advance();
  }
}

// Grid: as many thread blocks as fit the device, or as there are tiles; where keys are divided, one
// for each part: see prepare_kernel.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ typename Config::Params params,
                   const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardSchedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto* const shared_of_stream = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

  if (threadIdx.x == Config::kThreads - 1) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    if constexpr (Config::kStagedOutput) ptx::prefetch_tensor_map(&maps.out);
  }
  if (threadIdx.x < Config::kStreams) {
    auto& shared = shared_of_stream[threadIdx.x];
    shared.q_pipeline.init(Config::kConsumerWarps);
    shared.k_pipeline.init(Config::kConsumerWarps);
    shared.v_pipeline.init(Config::kConsumerWarps, Config::kTransposes ? Config::kTransposers : 1);
    if constexpr (Config::kTransposes) {
      for (auto& barrier : shared.rows_full) init_barrier(barrier, 1);
    }
    init_barrier(shared.tail_full, 1);
    shared.tiles.init(Config::kConsumerWarps + Config::kReceivers);
    init_barrier(shared.tile_wanted, 1);
    fence_barrier_init();
  }
  if constexpr (Config::kQuantised && Config::kLinear) {
    fill_ones<Config>(shared_of_stream[0]);
  }
  if constexpr (Config::kSpareRowsCount) clear_spare_rows<Config>(shared_of_stream[0], schedule);
  __syncthreads();
  // The earlier kernels of the stream may still run. Each warp waits for their end as late as it
  // can: where it first reads or writes device memory.
  if (schedule.lengths_on_device) wait_for_earlier_kernels<Config>(schedule);

  constexpr int kConsumerWarps = Config::kConsumerWarps, kStreams = Config::kStreams;
  if (warp < kStreams * kConsumerWarps) {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    auto& shared = shared_of_stream[warp / kConsumerWarps];
    const int warpgroup = warp % kConsumerWarps / 4;
    if constexpr (Config::kQuantised) {
      consume_quantised<Config>(params, maps, schedule, scale_log2, shared, warpgroup);
    } else {
      consume<Config>(params, schedule, scale_log2, shared, warpgroup);
    }
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int helper = warp - kStreams * kConsumerWarps;
    auto& shared = shared_of_stream[kStreams == 1 ? 0 : helper % kStreams];
    Producer<Config> producer{params, maps, schedule, shared, lane};
    if constexpr (kStreams == 1) {
      if (helper == 0) distribute_tiles<Config>(params, schedule, shared, lane);
      if (helper == 1) produce_keys(producer);
      if (helper == 2) {
        if constexpr (Config::kTwoTranspose) {
          transpose_values<Config>(params, schedule, shared, 1, lane);
        } else {
          produce_values(producer);
        }
      }
    } else {
      if (helper < kStreams) produce_all(producer, helper);
    }
    if (helper == 3) {
      wait_for_earlier_kernels<Config>(schedule);
      ptx::let_next_kernel_start();
      if constexpr (Config::kTransposes) {
        transpose_values<Config>(params, schedule, shared, 0, lane);
      }
      if (params.cu_seqlens_q != nullptr) {
        clear_gaps<typename Config::Out>(params, blockIdx.x, gridDim.x, lane);
      }
      // Who waits for the parts of the tiles left over waits for the other tiles too.
      if constexpr (Config::kMayFollowWhole) ptx::wait_for_earlier_kernels();
    }
  }
}

}  // namespace flash::sm90
