// The tiles of a Hopper backward, blocks of keys, and their steps over blocks of queries.
#pragma once

#include "common/mask.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/warp.h"
#include "params.h"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

// What the host decides about a launch.
struct BackwardSchedule : TileSchedule {
  bool clear_tail_q, clear_tail_k;  // there may be anything but zeros behind a sequence's last row
  bool lengths_on_device;           // to know a tile, device memory is read
  bool lone;  // no sequence has more than one tile, which writes its dQ itself
};

// Tiles are blocks of keys: how many each sequence has, for the scheduler.
template <int kBlockN>
struct KeyTiles {
  const BackwardParams& params;

  __device__ bool packed() const { return params.cu_seqlens_k != nullptr; }
  __device__ int batch() const { return params.batch; }
  __device__ int of_sequence(int batch) const {
    return (Sequence(params, batch).seqlen_k + kBlockN - 1) / kBlockN;
  }
};

// Where a warp is among the steps of a tile: a step is one block of queries for one query head. The
// last queries come first: under a causal mask all tiles see those, so that they add to dQ in step
// with each other.
struct StepIterator {
  int head, m_block;
  int left;  // steps, with this one

  __device__ void next(Range m_blocks) {
    --left;
    if (--m_block < m_blocks.begin) {
      ++head;
      m_block = m_blocks.end - 1;
    }
  }
};

// What a step is to the warp that adds its dQ.
struct alignas(8) Step {
  int row_tile;  // in the workspaces; -1: there are no more steps
  int turn;      // of the tile, among those that add to dQ of these queries: by the order of keys
};

// The queries of a step, to the warps that write dQ of a lone tile.
struct alignas(16) StepQueries {
  int head, batch, first_row, rows;
};

// One tile: keys n_begin .. n_begin + kBlockN - 1 and the blocks of queries that see some of them.
// The steps may be divided among several parts.
template <typename Config>
struct KeyTileRange {
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  Sequence sequence;
  int n_block, n_begin;
  Mask mask;
  Range m_blocks;

  // The scheduler hands out the last blocks first; of keys, the first are seen by most queries.
  __device__ KeyTileRange(const BackwardParams& params, const BackwardSchedule& schedule,
                          const Tile& tile)
      : sequence(params, tile.batch),
        n_block((params.cu_seqlens_k == nullptr ? schedule.blocks
                                                : (sequence.seqlen_k + kBlockN - 1) / kBlockN) -
                1 - tile.block),
        n_begin(n_block * kBlockN),
        mask{sequence.seqlen_k, sequence.seqlen_k - sequence.seqlen_q, params.window_left,
             params.window_right},
        m_blocks(query_blocks<kBlockM>(mask, sequence.seqlen_q, n_begin, n_begin + kBlockN)) {
    m_blocks.begin = warp_uniform(m_blocks.begin);
    m_blocks.end = n_begin < sequence.seqlen_k ? warp_uniform(m_blocks.end) : 0;
    mask.seqlen_k = warp_uniform(mask.seqlen_k);
    mask.shift = warp_uniform(mask.shift);
  }

  // The steps of this part, head by head.
  __device__ StepIterator steps(const BackwardParams& params, const BackwardSchedule& schedule,
                                const Tile& tile) const {
    const int group = params.nheads / params.nheads_kv;
    const int blocks = m_blocks.end - m_blocks.begin;
    if (blocks <= 0) return {0, 0, 0};
    const int head = tile.head_kv * group;
    if (schedule.splits == 1) return {head, m_blocks.end - 1, blocks * group};
    const int begin = blocks * group * tile.part / schedule.splits;
    const int end = blocks * group * (tile.part + 1) / schedule.splits;
    return {head + begin / blocks, m_blocks.end - 1 - begin % blocks, end - begin};
  }
};

}  // namespace flash::sm90
