// What warps of the Hopper backward do that are idle otherwise, if sequences are dense and tiles
// many and long: they clear the workspace of dQ for heads to come, and round dQ of heads that are
// done. The rows kernel clears the rest of it, the end kernel rounds the rest. If dQ is added to in
// order, there is one idle warp less, and none of this.
//
// Heads that share K and V count as one here: their tiles add to dQ of all of them.
//
// Where thread blocks take whole heads, idle warps round dQ of their own thread block's heads, and
// nobody clears: see add_dq_of_heads.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "common/pack.h"
#include "common/sequence.h"
#include "params.h"
#include "ptx/atomics.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"

namespace flash::sm90 {

constexpr int kIdleWarps = 2;  // of a thread block

// The counts in BackwardParams::dq_progress. All are 0 before the main kernel.
class DqProgress {
 public:
  __host__ __device__ explicit DqProgress(const BackwardParams& params)
      : counts_(params.dq_progress), heads_(params.batch * params.nheads_kv) {}

  // How many there are. row_tiles: of all heads
  int64_t size(int64_t row_tiles) const { return 2 + int64_t{2} * heads_ + row_tiles; }

  // Row tiles that have been drawn, to be cleared or rounded.
  __device__ int* clearing() const { return counts_; }
  __device__ int* rounding() const { return counts_ + 1; }
  // Of a head: steps whose dQ has been added, and row tiles that idle warps have cleared.
  __device__ int* added(int head) const { return counts_ + 2 + head; }
  __device__ int* cleared(int head) const { return counts_ + 2 + heads_ + head; }
  // Whether idle warps have rounded a row tile.
  __device__ int* rounded(int row_tile) const { return counts_ + 2 + 2 * heads_ + row_tile; }

 private:
  int* const counts_;
  const int heads_;
};

// The head of a row tile of the workspaces, over all batch entries.
template <int kBlockM>
__device__ int head_of_row_tile(const BackwardParams& params, int row_tile) {
  const int blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const int head = row_tile / params.row_tiles, batch = row_tile % params.row_tiles / blocks;
  return batch * params.nheads_kv + head / (params.nheads / params.nheads_kv);
}

// target = scale * 8 rows of accumulators of 16 rows, rounded to T: kTiles * 8 columns, of which
// headdim are stored, if `valid`.
// target: the lane's row; source: its accumulators of the first column tile
template <typename T, int kTiles>
__device__ void round_octet(T* target, const float2* source, float scale, bool valid, int headdim,
                            int lane) {
  constexpr int kTilesAtOnce = 4;
  static_assert(kTiles % kTilesAtOnce == 0);
#pragma unroll
  for (int n = 0; n < kTiles; n += kTilesAtOnce) {
    uint32_t x[kTilesAtOnce];
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const float2 pair = source[(n + i) * 2 * 32];
      x[i] = pack(pair.x * scale, pair.y * scale, T());
    }
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const int col = (n + i) * 8;
      if (valid && col < headdim) reinterpret_cast<uint32_t*>(target + col)[lane % 4] = x[i];
    }
  }
}

// Shared memory of the idle warps of a thread block, and of its adders.
template <int kHeadDim>
class IdleWarps {
  static constexpr int kStages = 2, kRows = 16;

 public:
  // By one thread.
  __device__ void init() {
    for (Warp& warp : warps_) {
      for (uint64_t& barrier : warp.full) init_barrier(barrier, 1);
      warp.clearing = 0;
      warp.rounding = -1;
    }
    at_work_ = 0;
    ended_ = false;
    number_ = 0;
    for (int& number : numbers_) number = -kRing;
    complete_.init(kIdleWarps);
  }

  // By an adder, before its first step of a tile: waits until the head's workspace is clear.
  __device__ void begin_head(const BackwardParams& params, const IdleWork& work, int head) {
    const int first = head * work.head_tiles;
    at_work_ = first;
    if (first < work.cleared) return;
    while (ptx::load_acquire(DqProgress(params).cleared(head)) < work.head_tiles) {
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
  }
  // By an adder, behind its last step of a tile, of which it has added so many.
  __device__ void end_head(const BackwardParams& params, int head, int added) {
    cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
    ptx::red_release_add(DqProgress(params).added(head), added);
  }
  // By an adder, when there are no more tiles.
  __device__ void end() { ended_ = true; }

  // ---- Whole heads: row tiles of dQ that are complete, numbered through, in a ring. -------------

  // By an adder: waits until this row tile of the head before has been rounded.
  __device__ void wait_rounded(int row_tile) {
    const int number = numbers_[row_tile];
    // Of an earlier one the stage has been filled again, so it has been rounded.
    if (number < number_ - kRing) return;
    complete_.wait_empty(Ring{static_cast<uint32_t>(number + kRing)});
  }
  // By an adder: a row tile that it has added to for the last time, which is in memory.
  __device__ void hand_over(int row_tile, const StepQueries& queries) {
    numbers_[row_tile] = number_;
    hand_over({row_tile, queries});
  }
  // By an adder, when there are no more tiles.
  __device__ void end_heads() { hand_over({-1, {}}); }

  // By idle warp `index`: rounds its share of the rows of each row tile, so that the place is soon
  // free. accum: as add_dq_of_heads has it
  template <typename Config>
  __device__ void round_heads(const BackwardParams& params, const float* accum, int index,
                              int lane) {
    using T = typename Config::T;
    constexpr int kShare = Config::kBlockM / kIdleWarps;
#pragma unroll 1
    for (Ring state;; state.advance()) {
      complete_.wait_full(state);
      const Complete& tile = ring_[state.stage()];
      if (tile.row_tile < 0) return;
      const StepQueries& queries = tile.queries;
      const int row = index * kShare;
      round<T, kShare>(
          rows_of<T>(params.dq, queries.batch, queries.first_row + row + lane / 4, queries.head),
          params.dq.row_stride, accum + tile.row_tile * Config::kDqSize + row * kHeadDim,
          params.gradient_scale, queries.rows - row - lane / 4, params.headdim, warps_[index], lane,
          state.count);
      complete_.release(state, lane);
    }
  }

  // By idle warp `index`, until the end.
  template <typename Config>
  __device__ void run(const BackwardParams& params, const IdleWork& work, int index, int lane) {
    constexpr int kBlockM = Config::kBlockM;
    Warp& warp = warps_[index];
#pragma unroll 1
    for (;;) {
      int tile = -1;
      bool clears = false;
      if (lane == 0) tile = next_tile(params, work, warp, clears);
      tile = __shfl_sync(0xffffffff, tile, 0);
      if (tile < 0) return;
      clears = __shfl_sync(0xffffffff, clears, 0);
      const int blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
      const int batch = tile / blocks / params.nheads, head = tile / blocks % params.nheads;
      const int row_tile = head * params.row_tiles + batch * blocks + tile % blocks;
      float* const accum = params.dq_accum + int64_t{row_tile} * Config::kDqSize;
      if (clears) {
        clear<Config::kDqSize>(accum, lane);
        if (lane == 0) ptx::red_release_add(DqProgress(params).cleared(tile / work.head_tiles), 1);
      } else {
        // The end kernel, which asks, runs when this one has ended.
        if (lane == 0) *DqProgress(params).rounded(row_tile) = 1;
        const int first_row = tile % blocks * kBlockM + lane / 4;
        round<typename Config::T, kBlockM>(
            rows_of<typename Config::T>(params.dq, batch, first_row, head), params.dq.row_stride,
            accum, params.gradient_scale, params.seqlen_q - first_row, params.headdim, warp, lane,
            0);
      }
    }
  }

 private:
  struct Warp {
    alignas(128) float4 rows[kStages][kRows * kHeadDim / 4];
    uint64_t full[kStages];
    // The next row tile that it may draw to clear, at least, and the one that it has drawn to
    // round; -1: none. They are here for want of registers.
    volatile int clearing, rounding;
  };

  // By one lane: a row tile that can be cleared, or rounded; -1: the thread block has ended.
  __device__ int next_tile(const BackwardParams& params, const IdleWork& work, Warp& warp,
                           bool& clears) {
    const DqProgress progress(params);
    while (!ended_) {
      if (work.cleared + warp.clearing < min(work.tiles, at_work_ + work.ahead)) {
        const int drawn = atomicAdd(progress.clearing(), 1);
        warp.clearing = drawn + 1;
        if (work.cleared + drawn < work.tiles) {
          clears = true;
          return work.cleared + drawn;
        }
      }
      if (warp.rounding < 0) warp.rounding = atomicAdd(progress.rounding(), 1);
      const int tile = warp.rounding;
      if (tile < work.tiles &&
          ptx::load_acquire(progress.added(tile / work.head_tiles)) >= work.head_steps) {
        warp.rounding = -1;
        return tile;
      }
      __nanosleep(300);
    }
    return -1;
  }

  template <int kSize>
  __device__ void clear(float* accum, int lane) {
    float4* const target = reinterpret_cast<float4*>(accum) + lane;
#pragma unroll 4
    for (int i = 0; i < kSize / 4; i += 32) target[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    __syncwarp();
  }

  // kTileRows rows of a row tile.
  // target: the lane's first row; left: rows from there on; calls: earlier ones of this warp
  template <typename T, int kTileRows>
  __device__ void round(T* target, int64_t row_stride, const float* accum, float scale, int left,
                        int headdim, Warp& warp, int lane, uint32_t calls) {
    constexpr int kChunks = kTileRows / kRows;
    static_assert(kChunks % kStages == 0);
    const auto load = [&](int chunk, int stage) {
      if (lane != 0) return;
      constexpr int kBytes = sizeof(warp.rows[0]);
      arrive_expecting(warp.full[stage], kBytes);
      cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, warp.rows[stage],
                               accum + chunk * (kRows * kHeadDim), kBytes, &warp.full[stage]);
    };
    if (lane == 0) cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
#pragma unroll
    for (int i = 0; i < kStages; ++i) load(i, i);
#pragma unroll 1
    for (int octet = 0; octet < kTileRows / 8; ++octet) {
      const PipelineState<kStages> state{calls * kChunks + static_cast<uint32_t>(octet) / 2};
      wait(warp.full[state.stage()], state.phase());
      const auto* const source = reinterpret_cast<const float2*>(warp.rows[state.stage()] + lane);
      round_octet<T, kHeadDim / 8>(target, source + octet % 2, scale, left > 0, headdim, lane);
      target += 8 * row_stride;
      left -= 8;
      __syncwarp();
      const int chunk = octet / 2 + kStages;
      if (octet % 2 == 1 && chunk < kChunks) load(chunk, state.stage());
    }
  }

  struct Complete {
    int row_tile;  // of the workspace; -1: there are no more
    StepQueries queries;
  };
  static constexpr int kRing = 4;
  using Ring = PipelineState<kRing>;

  __device__ void hand_over(const Complete& tile) {
    const Ring state{static_cast<uint32_t>(number_)};
    complete_.wait_empty(state);
    ring_[state.stage()] = tile;
    arrive(complete_.full[state.stage()]);
    ++number_;
  }

  Warp warps_[kIdleWarps];
  volatile int at_work_;  // the first row tile of the head at work
  volatile bool ended_;

  Complete ring_[kRing];
  Pipeline<kRing> complete_;  // a stage is empty when all idle warps have rounded their shares
  // Of the adder alone: how many it has handed over, and the last number of each row tile of the
  // workspace; -kRing: none.
  int number_;
  int numbers_[kMostHeadTiles];
};

}  // namespace flash::sm90
