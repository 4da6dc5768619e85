// Attention forward for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// Thread blocks stay on their SM and take tile after tile. One warp, the scheduler, finds the next;
// one, the producer, has the copy engine fill shared memory: Q of a tile, then its blocks of keys
// and values from the last to the first. Two or three warpgroups, the consumers, own 64 queries
// each; scores and output stay in registers.
//
// NaN or Inf outside a sequence never reaches its result; of keys inside it that the mask hides
// from a query the same is said as in sm80/forward_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/ptx>
#include <type_traits>

#include "common/dropout.h"
#include "common/mask.h"
#include "common/pack.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/shared_tile.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/named_barrier.h"
#include "ptx/opaque.h"
#include "ptx/setmaxnreg.h"
#include "ptx/wgmma.h"
#include "sm90/forward_config.cuh"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

// Boxes have kBoxCols columns; outside the tensors they read zeros.
struct ForwardMaps {
  CUtensorMap q;  // (batch, nheads_kv, rows, nheads / nheads_kv, headdim), box: a tile's queries
  CUtensorMap k;  // (slots, nheads_kv, rows, headdim), box: key_box_rows
  CUtensorMap v;  // (slots, nheads_kv, rows, headdim_v)
};

// How often a ring of barriers has been advanced: one register holds place and phase.
template <int kSize>
struct Ring {
  uint32_t count = 0;

  __device__ int place() const { return count % kSize; }
  __device__ uint32_t phase() const { return count / kSize % 2; }
  __device__ void advance() { ++count; }
};

// Waits for the end of a barrier's phase. A new barrier is in phase 0, and its phase 1 counts as
// over.
__device__ inline void wait(uint64_t& barrier, uint32_t phase) {
  while (!cuda::ptx::mbarrier_try_wait_parity(&barrier, phase)) {
  }
}

__device__ inline void arrive(uint64_t& barrier) { cuda::ptx::mbarrier_arrive(&barrier); }

__device__ inline void arrive_of_warp(uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}

// One tile: queries m_begin .. m_end - 1 and the keys that one of them sees, n_begin .. n_end - 1.
template <int kBlockN>
struct TileRange {
  Sequence sequence;
  Mask mask;
  int m_begin, m_end;
  int n_begin, n_end;  // n_begin is a multiple of kBlockN; n_begin >= n_end: none

  __device__ TileRange(const ForwardParams& params, const Schedule& schedule, const Tile& tile)
      : sequence(params, tile.batch),
        mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
             params.window_right},
        m_begin(tile.m_block * schedule.rows),
        m_end(min(m_begin + schedule.rows, sequence.seqlen_q)),
        n_begin(mask.first_key(m_begin) / kBlockN * kBlockN),
        n_end(mask.end_key(m_end - 1)) {}

  __device__ bool has_keys() const { return n_begin < n_end; }

  // First key of the block that is taken first; before n_begin if there is none.
  __device__ int last_block() const {
    return has_keys() ? (n_end - 1) / kBlockN * kBlockN : n_begin - kBlockN;
  }
};

// By each warp of the consumers and by both producers; `ring` is the caller's.
template <typename SharedStorage>
__device__ Tile receive_tile(SharedStorage& shared, Ring<kTileSlots>& ring, int lane) {
  wait(shared.tile_full[ring.place()], ring.phase());
  const Tile tile = shared.tiles[ring.place()];
  arrive_of_warp(shared.tile_empty[ring.place()], lane);
  ring.advance();
  return tile;
}

// ---- Scheduler ---------------------------------------------------------------------------------

template <typename SharedStorage>
__device__ void distribute_tiles(const ForwardParams& params, const Schedule& schedule,
                                 SharedStorage& shared, int lane) {
  TileScheduler scheduler(params, schedule, lane);
  Ring<kTileSlots> ring;
  Ring<1> wanted_ring;
  const auto draw = [&] {
    scheduler.next();
    return scheduler.tile();
  };
  for (Tile tile = scheduler.tile();;) {
    wait(shared.tile_empty[ring.place()], ring.phase() ^ 1);
    if (lane == 0) shared.tiles[ring.place()] = tile;
    arrive_of_warp(shared.tile_full[ring.place()], lane);
    ring.advance();
    if (tile.batch < 0) return;
    if (schedule.draw_early) tile = draw();
    // There is room for the next tile's keys: whoever is done first shall have it.
    wait(shared.tile_wanted, wanted_ring.phase());
    wanted_ring.advance();
    if (!schedule.draw_early) tile = draw();
  }
}

// ---- Producers ---------------------------------------------------------------------------------

// Has the copy engine fetch rows `row` .. `row + kBlockN - 1` of a sequence's keys or values, all
// lanes of a warp together. tile: (kParts<kCols>, kBlockN, kBoxCols)
template <typename Config, int kCols>
__device__ void load_keys(typename Config::T* tile, const CUtensorMap& map, uint64_t& full,
                          const ForwardParams& params, int box_rows, const Sequence& sequence,
                          int batch, int row, int head_kv, int lane) {
  constexpr int kBlockN = Config::kBlockN;
  if (lane == 0) {
    cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                         cuda::ptx::space_shared, &full,
                                         kBlockN * kParts<kCols> * kPartBytes);
  }
  __syncwarp();
#pragma unroll 1  // registers are few here
  for (int box_row = ptx::opaque(lane) * box_rows; box_row < kBlockN; box_row += 32 * box_rows) {
    int slot = sequence.k_batch, slot_row = ptx::opaque(sequence.k_first) + row + box_row;
    if (params.block_table != nullptr) {
      // Past the table's end it fetches some page: what lies outside the sequence is hidden.
      const int page = min(slot_row, params.seqlen_k - 1) / params.page_size;
      slot = params.block_table[ptx::opaque(batch) * params.block_table_stride + page];
      slot = min(max(slot, 0), params.slots_k - 1);
      slot_row %= params.page_size;
    }
#pragma unroll
    for (int part = 0; part < kParts<kCols>; ++part) {
      cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global,
                                      tile + (part * kBlockN + box_row) * kBoxCols, &map,
                                      {part * kBoxCols, slot_row, head_kv, slot}, &full);
    }
  }
}

// Zeros rows `valid_rows` .. kBlockN - 1 of a block of V, by one warp: their probabilities are 0,
// but 0 * NaN is NaN.
template <typename Config>
__device__ void clear_tail(typename Config::T* tile, int valid_rows, int lane) {
  constexpr int kChunks = kBoxCols / 8;  // of a row of a part
#pragma unroll 1
  for (int part = 0; part < kParts<Config::kHeadDimV>; ++part) {
    auto* const rows = reinterpret_cast<uint4*>(tile + part * Config::kBlockN * kBoxCols);
#pragma unroll 1
    for (int i = valid_rows * kChunks + lane; i < Config::kBlockN * kChunks; i += 32) {
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// Loads Q of each tile and its keys, block by block from the last to the first, and wants the next
// tile when the last of them are loaded.
template <typename Config>
__device__ void produce_keys(const ForwardParams& params, const ForwardMaps& maps,
                             const Schedule& schedule, typename Config::SharedStorage& shared,
                             int lane) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  Ring<Config::kStages> ring;
  Ring<Config::kQStages> q_ring;
  Ring<kTileSlots> tile_ring;
  for (;;) {
    const Tile tile = receive_tile(shared, tile_ring, lane);
    if (tile.batch < 0) break;
    const TileRange<kBlockN> range(params, schedule, tile);
    if (!range.has_keys()) arrive_of_warp(shared.tile_wanted, lane);
    for (int n = range.last_block(); n >= range.n_begin; n -= kBlockN) {
      wait(shared.k_empty[ring.place()], ring.phase() ^ 1);
      if (n == range.n_begin) arrive_of_warp(shared.tile_wanted, lane);
      load_keys<Config, Config::kHeadDim>(
          shared.k[ring.place()], maps.k, shared.k_full[ring.place()], params,
          schedule.key_box_rows, range.sequence, tile.batch, n, tile.head_kv, lane);
      ring.advance();
      if (n + kBlockN < range.n_end) continue;
      // Behind the first keys, which need not wait for the last tile to be done.
      const int stage = q_ring.place();
      wait(shared.q_empty[stage], q_ring.phase() ^ 1);
      q_ring.advance();
      constexpr int kQParts = kParts<Config::kHeadDim>;
      if (lane == 0) {
        cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                             cuda::ptx::space_shared, &shared.q_full[stage],
                                             schedule.rows * schedule.group * kQParts * kPartBytes);
      }
      __syncwarp();
      if (lane < kQParts) {
        cuda::ptx::cp_async_bulk_tensor(
            cuda::ptx::space_cluster, cuda::ptx::space_global,
            shared.q[stage] + lane * kBlockM * kBoxCols, &maps.q,
            {ptx::opaque(lane) * kBoxCols, ptx::opaque(tile.head) % schedule.heads_of_kv,
             range.sequence.q_first + range.m_begin, tile.head_kv, range.sequence.q_batch},
            &shared.q_full[stage]);
      }
    }
  }
}

// Loads the values of the same blocks.
template <typename Config>
__device__ void produce_values(const ForwardParams& params, const ForwardMaps& maps,
                               const Schedule& schedule, typename Config::SharedStorage& shared,
                               int lane) {
  constexpr int kBlockN = Config::kBlockN;
  Ring<Config::kStages> ring;
  Ring<kTileSlots> tile_ring;
  Ring<1> tail_ring;
  for (;;) {
    const Tile tile = receive_tile(shared, tile_ring, lane);
    if (tile.batch < 0) break;
    const TileRange<kBlockN> range(params, schedule, tile);
    for (int n = range.last_block(); n >= range.n_begin; n -= kBlockN) {
      wait(shared.v_empty[ring.place()], ring.phase() ^ 1);
      const int valid_rows = range.sequence.seqlen_k - n;
      const bool clear = schedule.clear_tail && valid_rows < kBlockN;
      uint64_t& full = shared.v_full[ring.place()];
      load_keys<Config, Config::kHeadDimV>(
          shared.v[ring.place()], maps.v, clear ? shared.tail_full : full, params,
          schedule.key_box_rows, range.sequence, tile.batch, n, tile.head_kv, lane);
      if (clear) {
        wait(shared.tail_full, tail_ring.phase());
        tail_ring.advance();
        clear_tail<Config>(shared.v[ring.place()], valid_rows, lane);
        arrive_of_warp(full, lane);
      }
      ring.advance();
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

// Ids of named barriers: a turn for each consumer warpgroup.
enum NamedBarrier { kTurn = 1 };

// Starts S = Q K^T. q, k: descriptors of (kParts<kHeadDim>, rows, kBoxCols), of kBlockM rows from
// the warpgroup's first on and of kBlockN rows
template <typename Config>
__device__ void start_scores(float (&scores)[Config::kBlockN / 8][4], uint64_t q, uint64_t k) {
  constexpr int kSteps = kBoxCols / 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < Config::kHeadDim / 16; ++d) {
    const int part = d / kSteps, bytes = d % kSteps * 32;
    ptx::wgmma_k16<0>(scores, q + (part * Config::kBlockM * kPartBytes + bytes) / 16,
                      k + (part * Config::kBlockN * kPartBytes + bytes) / 16, d > 0,
                      typename Config::T());
  }
  ptx::wgmma_commit();
}

// Starts O += P V. p: A operands, 16 keys each. v: descriptor of (kParts<kHeadDimV>, kBlockN,
// kBoxCols)
template <typename Config>
__device__ void start_output(float (&out)[Config::kHeadDimV / 8][4],
                             const uint32_t (&p)[Config::kBlockN / 16][4], uint64_t v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 16; ++n) {
    ptx::wgmma_k16<1>(out, p[n], v + n * 16 * kPartBytes / 16, true, typename Config::T());
  }
  ptx::wgmma_commit();
}

// P = exp(S) relative to the rows' references, rounded to T; returns this lane's sum over each row.
// Two neighbouring accumulators are then an A operand: no data moves between lanes.
// kept_of_block(n): whether dropout keeps the probabilities [2 n], [2 n + 1] (KeptOfBlock)
template <typename T, int kColTiles, typename KeptOf>
__device__ float2 exponentiate_scores(uint32_t (&p)[kColTiles / 2][4],
                                      const SoftmaxState<1>& softmax,
                                      const float (&scores)[1][kColTiles][4],
                                      KeptOf kept_of_block) {
  float sums[2] = {};
#pragma unroll
  for (int n = 0; n < kColTiles / 2; ++n) {
    const auto kept = kept_of_block(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = i % 2 * 2, half = i % 2;
      const float* const pair = &scores[0][2 * n + i / 2][j];
      const float low = softmax.power(pair[0], half), high = softmax.power(pair[1], half);
      sums[half] += low;
      sums[half] += high;
      p[n][i] = pack(kept(i / 2, j) ? low : 0.f, kept(i / 2, j + 1) ? high : 0.f, T());
    }
  }
  return make_float2(sums[0], sums[1]);
}

// The probabilities of the next block of scores. Nobody looks for the rows' maxima: the sums tell
// whether scores have outgrown the references. Only then, a few times a row, the references become
// the maxima, `out` is rescaled to them and the block is done again. Of the first block this is
// known beforehand.
template <typename T, bool kFirst, int kColTiles, int kOutTiles, typename KeptOf>
__device__ void softmax_step(uint32_t (&p)[kColTiles / 2][4], SoftmaxState<1>& softmax,
                             const float (&scores)[1][kColTiles][4], float (&out)[1][kOutTiles][4],
                             KeptOf kept_of_block) {
  float2 sums;
  bool outgrown[2] = {true, true};
  if constexpr (!kFirst) {
    sums = exponentiate_scores<T>(p, softmax, scores, kept_of_block);
    outgrown[0] = !(sums.x <= kLargestSum);  // NaN too
    outgrown[1] = !(sums.y <= kLargestSum);
  }
  if (kFirst || __any_sync(0xffffffff, outgrown[0] || outgrown[1])) {
    float factors[2];
    raise_reference(softmax, scores, outgrown, factors);
    if constexpr (!kFirst) rescale_output(out, factors);
    sums = exponentiate_scores<T>(p, softmax, scores, kept_of_block);
  }
  softmax.sum[0] += sums.x;
  softmax.sum[1] += sums.y;
}

// The 4 x 4 matrix of which each lane of a quad holds a row, transposed.
__device__ inline void transpose_in_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i | step], step);
      if (upper) {
        x[i] = taken;
      } else {
        x[i | step] = taken;
      }
    }
  }
}

// Writes one row of accumulators, rounded to T: 16 bytes a lane, 64 a quad.
// out: accumulators of m16n8, of which it takes the upper or lower `half` of the rows
// row: the row's first element, or null: not written
template <typename T, int kOutTiles>
__device__ void store_row(T* row, int cols, const float (&out)[kOutTiles][4], int half, int lane) {
  static_assert(kOutTiles % 4 == 0);
#pragma unroll
  for (int d = 0; d < kOutTiles; d += 4) {
    uint32_t chunk[4];  // columns 2t, 2t+1 of four accumulators; then 8 columns of the t-th
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      chunk[i] = pack(out[d + i][2 * half], out[d + i][2 * half + 1], T());
    }
    transpose_in_quad(chunk, lane);
    const int col = (d + lane % 4) * 8;
    if (row != nullptr && col < cols) {
      *reinterpret_cast<uint4*>(row + col) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
    }
  }
}

template <typename Config>
__device__ void consume(const ForwardParams& params, const ForwardMaps& maps,
                        const Schedule& schedule, float scale_log2,
                        typename Config::SharedStorage& shared, int warpgroup) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kColTiles = kBlockN / 8, kOutTiles = Config::kHeadDimV / 8;
  constexpr int kPartBytes = kBoxCols * 2;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int first_row = warpgroup * kWarpgroupRows + thread / 32 * 16 + lane / 4;  // and + 8

  // (The compiler shall know that a stage is the same in all lanes.)
  const auto q_descriptor = [&](int stage) {
    return ptx::wgmma_descriptor(
        shared_address(shared.q[warp_uniform(stage)]) + warpgroup * kWarpgroupRows * kPartBytes, 0);
  };
  const auto k_descriptor = [&](int stage) {
    return ptx::wgmma_descriptor(shared_address(shared.k[warp_uniform(stage)]), 0);
  };
  const auto v_descriptor = [&](int stage) {
    return ptx::wgmma_descriptor(shared_address(shared.v[warp_uniform(stage)]),
                                 kBlockN * kPartBytes);
  };

  // Whoever holds its turn issues matmuls while the others are at their softmax.
  const auto take_turn = [&] { ptx::bar_sync(kTurn + warpgroup, 2 * kWarpgroup); };
  const auto pass_turn = [&](int to) { ptx::bar_arrive(kTurn + to, 2 * kWarpgroup); };
  const int next_warpgroup = warpgroup + 1 == Config::kConsumers ? 0 : warpgroup + 1;
  if (next_warpgroup == 0) pass_turn(0);

  Ring<Config::kStages> k_ring, v_ring;
  Ring<Config::kQStages> q_ring;
  Ring<kTileSlots> tile_ring;
  float scores[1][kColTiles][4];
  bool started = false;  // the tile's first scores are there already
  Tile next = receive_tile(shared, tile_ring, lane);
  while (next.batch >= 0) {
    const Tile tile = next;
    const TileRange<kBlockN> range(params, schedule, tile);
    const Mask& mask = range.mask;
    // Rows of a tile are queries of `group` heads, heads fastest.
    const auto query_of = [&](int row) {
      return range.m_begin + (schedule.group == 1 ? row : row / schedule.group);
    };
    const auto head_of = [&](int row) {
      return schedule.group == 1 ? tile.head : tile.head * schedule.group + row % schedule.group;
    };
    const int queries[2] = {query_of(first_row), query_of(first_row + 8)};
    const int first_query = query_of(warpgroup * kWarpgroupRows);  // of the warpgroup
    const int last_query = query_of(warpgroup * kWarpgroupRows + kWarpgroupRows - 1);

    float out[1][kOutTiles][4] = {};
    float sinks[2] = {-INFINITY, -INFINITY};
    if (params.s_aux != nullptr) {
      // Rows past the last query of a tile may name no head.
      sinks[0] = params.s_aux[min(head_of(first_row), params.nheads - 1)];
      sinks[1] = params.s_aux[min(head_of(first_row + 8), params.nheads - 1)];
    }
    SoftmaxState<1> softmax(kFull ? kLog2e : scale_log2, sinks, lane % 4 == 0);
    const ScoreTransform transform(params, tile.batch, tile.head, mask.shift);
    const Dropout dropout(params, tile.batch, tile.head);
    const auto transform_and_mask = [&](float (&scores)[1][kColTiles][4], int n) {
      const int key = n + lane % 4 * 2;
      if constexpr (kFull) {
        transform.apply(scores, queries[0], key, [](int, int, int, float) {});
      }
      if (mask.cuts(first_query, last_query - first_query + 1, n, kBlockN)) {
        apply_mask(scores, mask, [&](int, int half) { return queries[half]; }, key);
      }
    };
    uint32_t p[kColTiles / 2][4];
    const auto softmax_block = [&](auto first, int n) {
      constexpr bool kFirst = decltype(first)::value;
      transform_and_mask(scores, n);
      if (kFull && dropout.enabled) {
        softmax_step<T, kFirst>(p, softmax, scores, out, [&](int i) {
          return dropout.kept(queries[0] / 16, n / 16 + i, lane);
        });
      } else {
        softmax_step<T, kFirst>(p, softmax, scores, out,
                                [](int) { return [](int, int) { return true; }; });
      }
    };

    const auto begin_scores = [&] {
      start_scores<Config>(scores[0], q_descriptor(q_ring.place()), k_descriptor(k_ring.place()));
    };
    const auto begin_output = [&] {
      start_output<Config>(out[0], p, v_descriptor(v_ring.place()));
    };
    const auto release_k = [&] {
      arrive_of_warp(shared.k_empty[k_ring.place()], lane);
      k_ring.advance();
    };
    const auto release_v = [&] {
      arrive_of_warp(shared.v_empty[v_ring.place()], lane);
      v_ring.advance();
    };
    const auto finish = [&] {
      float lse[2];
      normalize_output(softmax, out, kFull && dropout.enabled ? dropout.scale : 1.f, lse,
                       WarpTeam());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8;
        T* target = nullptr;
        if (row < schedule.rows * schedule.group && queries[half] < range.m_end) {
          const int head = head_of(row), query = range.sequence.q_first + queries[half];
          target = rows_of<T>(params.out, range.sequence.q_batch, query, head);
          if (lane % 4 == 0) {
            params.lse[range.sequence.q_batch * params.lse_batch_stride +
                       head * params.lse_head_stride + query] = lse[half];
          }
        }
        store_row(target, params.headdim_v, out[0], half, lane);
      }
    };

    if (range.has_keys()) {
      int n = range.last_block();
      if (!started) {
        wait(shared.q_full[q_ring.place()], q_ring.phase());
        wait(shared.k_full[k_ring.place()], k_ring.phase());
        begin_scores();
        ptx::wgmma_wait<0>(scores[0]);
        release_k();
      }
      softmax_block(std::true_type(), n);
      // Each step: the scores of the next block of keys, and the output of this one.
      for (n -= kBlockN; n >= range.n_begin; n -= kBlockN) {
        wait(shared.v_full[v_ring.place()], v_ring.phase());
        wait(shared.k_full[k_ring.place()], k_ring.phase());
        take_turn();
        begin_scores();
        begin_output();
        pass_turn(next_warpgroup);
        ptx::wgmma_wait<1>(scores[0]);
        release_k();
        ptx::wgmma_wait<0>(out[0]);
        release_v();
        softmax_block(std::false_type(), n);
      }
      arrive_of_warp(shared.q_empty[q_ring.place()], lane);
      q_ring.advance();
      next = receive_tile(shared, tile_ring, lane);
      started = next.batch >= 0 && TileRange<kBlockN>(params, schedule, next).has_keys();
      wait(shared.v_full[v_ring.place()], v_ring.phase());
      if (started) {
        // The output leaves beside the first scores of the next tile.
        take_turn();
        begin_output();
        wait(shared.q_full[q_ring.place()], q_ring.phase());
        wait(shared.k_full[k_ring.place()], k_ring.phase());
        begin_scores();
        pass_turn(next_warpgroup);
        ptx::wgmma_wait<1>(out[0]);
        release_v();
        finish();
        ptx::wgmma_wait<0>(scores[0]);
        release_k();
      } else {
        take_turn();
        begin_output();
        pass_turn(next_warpgroup);
        ptx::wgmma_wait<0>(out[0]);
        release_v();
        finish();
      }
    } else {
      next = receive_tile(shared, tile_ring, lane);
      started = false;
      finish();
    }
  }
}

// Grid: as many thread blocks as fit the device, or as there are tiles; see launch_forward.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ Schedule schedule, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);

  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      cuda::ptx::mbarrier_init(&barrier, arrivals);
    };
    for (int i = 0; i < Config::kQStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], Config::kConsumerWarps);
    }
    init(shared.tail_full, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], Config::kConsumerWarps);
      init(shared.v_full[i], 1);
      init(shared.v_empty[i], Config::kConsumerWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      init(shared.tile_full[i], 1);
      init(shared.tile_empty[i], Config::kConsumerWarps + 2);  // and two producers
    }
    init(shared.tile_wanted, 1);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (warp == 0) distribute_tiles(params, schedule, shared, lane);
    if (warp == 1) produce_keys<Config>(params, maps, schedule, shared, lane);
    if (warp == 2) produce_values<Config>(params, maps, schedule, shared, lane);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(params, maps, schedule, scale_log2, shared, warpgroup - 1);
  }
}

}  // namespace flash::sm90
