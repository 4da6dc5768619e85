// The tiles of a Hopper backward, blocks of keys, and their steps over blocks of queries.
#pragma once

#include <cuda.h>

#include "common/mask.h"
#include "common/range.h"
#include "common/sequence.h"
#include "common/warp.h"
#include "params.h"
#include "sm90/idle_work.h"
#include "sm90/pipeline.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/unequal_tiles.h"

namespace flash::sm90 {

// Barriers of blocks whose rows behind the sequence are cleared when they have arrived.
enum Tail { kTailOfK, kTailOfV, kTailOfQ, kTailOfDout, kTails };

// What the host decides about a launch.
struct BackwardSchedule : TileSchedule {
  int group;                        // query heads of a head of K and V
  bool clear_tail_q, clear_tail_k;  // there may be anything but zeros behind a sequence's last row
  bool lengths_on_device;           // to know a tile, device memory is read
  bool lone;  // no sequence has more than one tile, which writes its dQ itself
  // Without a mask: each tile of a head begins with other queries, and all of them run at a time.
  bool rotated;
  // Of whole heads, else 0: row tiles of the heads that share K and V, in the longest sequence. A
  // thread block takes all tiles of them, one after the other, and has a workspace of its own for
  // dQ.
  int head_tiles;
  int head_blocks;  // these tiles, else 1: so many tickets are drawn at a time
  // 1 if tickets are of packed sequences, one after the other. Those of whole heads are counted as
  // if all sequences were as long as the longest.
  int packed_tickets;
  UnequalParts unequal;  // of dense sequences, if it has any

  // The main kernel writes dQ, where some key is seen.
  bool writes_dq() const { return lone || head_tiles > 0; }

  IdleWork idle;

  // Those of which the end kernel adds up parts, if they have several.
  __host__ __device__ int divided_tiles() const {
    if (unequal.blocks > 0) return tiles / blocks * unequal.blocks;
    return splits == 1 ? 0 : tiles - whole;
  }
  // How many places they have.
  int64_t places_of_parts() const {
    return unequal.blocks > 0 ? tiles : int64_t{1} * divided_tiles() * splits;
  }
};

// Maps (batch, heads, rows, dim). Outside the tensors they read zeros and write nothing.
struct BackwardMaps {
  CUtensorMap q, k, v, dout;  // boxes: the rows of a block
  CUtensorMap dk, dv;         // boxes: kWarpRows
};

// The tile or part with a ticket. tile: as the scheduler has it
__device__ inline Tile key_tile(const BackwardSchedule& schedule, const Tile& tile) {
  if (schedule.unequal.blocks == 0 || tile.batch < 0) return tile;
  return unequal_part(schedule, schedule.unequal, tile);
}

// One of divided_tiles().
__device__ inline Tile divided_key_tile(const BackwardSchedule& schedule, int number) {
  if (schedule.unequal.blocks > 0) return unequal_tile(schedule, schedule.unequal, number);
  if (schedule.whole == 0) return divided_tile(schedule, number);
  Tile tile = dense_tile(schedule, schedule.whole + number);
  tile.parts = schedule.splits;
  return tile;
}

// Tiles are blocks of keys: how many each sequence has, for the scheduler.
template <int kBlockN, bool kMayBeWholeHeads = false>
struct KeyTiles {
  const BackwardParams& params;
  const BackwardSchedule& schedule;

  __device__ bool packed() const { return schedule.packed_tickets; }
  __device__ int batch() const { return params.batch; }
  __device__ int of_sequence(int batch) const {
    return (Sequence(params, batch).seqlen_k + kBlockN - 1) / kBlockN;
  }
  __device__ bool mixed() const { return false; }
  __device__ bool together() const { return false; }
  __device__ int run() const { return kMayBeWholeHeads ? schedule.head_blocks : 1; }
  // Of a packed sequence, blocks behind its last: the first tickets of each of its runs.
  __device__ int missing(const Tile& tile) const {
    if (run() == 1 || params.cu_seqlens_k == nullptr) return 0;
    return max(run() - max(of_sequence(tile.batch), 1) - tile.block, 0);
  }
  // Where tiles wait for earlier ones, those may not be of a worker that has no SM yet.
  __device__ bool all_drawn() const { return params.dq_turn != nullptr && !schedule.rotated; }
};

// The next tile of a thread block, which begins when this one has ended. If tiles are rotated, this
// one may wait for all of its section, so the next is of another section.
template <typename Scheduler>
__device__ void next_tile(Scheduler& scheduler, const BackwardSchedule& schedule) {
  schedule.rotated ? scheduler.next_undrawn() : scheduler.next();
}

// The same, behind a tile of this block. Of whole heads the last keys come first.
template <typename Scheduler>
__device__ void next_tile(Scheduler& scheduler, const BackwardSchedule& schedule, int block) {
  block + 1 < schedule.head_blocks ? scheduler.next_of_run() : next_tile(scheduler, schedule);
}

// Where a warp is among the steps of a tile: a step is one block of queries for one query head. The
// last queries come first, unless tiles are rotated: under a causal mask all tiles see those, so
// that they add to dQ in step with each other.
struct StepIterator {
  int head, m_block;
  int left;   // steps, with this one
  int first;  // block of queries of each head

  // Returns whether it is the first of another head.
  __device__ bool next(Range m_blocks) {
    --left;
    if (--m_block < m_blocks.begin) m_block = m_blocks.end - 1;
    if (m_block == first) ++head;
    return m_block == first;
  }
};

// What a step is to the warps that bring its dQ to memory.
struct alignas(16) Step {
  int row_tile;  // in the workspaces; -1: there are no more steps
  int turn;  // of the tile, among those that add to dQ of these queries; without turns: its n_block
  bool last;  // of the tile
};

// The last steps, told by the producer. It is as many ahead as Q has stages, and those who read are
// one step behind the consumers: a slot is free when its turn comes.
template <int kSlots>
struct StepBoard {
  using State = PipelineState<kSlots>;
  Step slots[kSlots];
  uint64_t full[kSlots];

  // By one thread.
  __device__ void init() {
    for (int i = 0; i < kSlots; ++i) init_barrier(full[i], 1);
  }
  __device__ void tell(State state, const Step& step) {
    slots[state.stage()] = step;
    arrive(full[state.stage()]);
  }
  __device__ const Step& look(State state) {
    wait(full[state.stage()], state.phase());
    return slots[state.stage()];
  }
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
        n_block((schedule.packed_tickets ? (sequence.seqlen_k + kBlockN - 1) / kBlockN
                                         : schedule.blocks) -
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

  // The steps of this part, head by head. Where dQ is added to in order, parts that end inside of a
  // head would wait for each other.
  __device__ StepIterator steps(const BackwardParams& params, const BackwardSchedule& schedule,
                                const Tile& tile) const {
    const int group = schedule.group, blocks = m_blocks.end - m_blocks.begin;
    if (blocks <= 0) return {};
    const int head = tile.head_kv * group;
    const int first = schedule.rotated ? first_block() : m_blocks.end - 1;
    if (tile.parts == 1) return {head, first, blocks * group, first};
    int begin = blocks * group * tile.part / tile.parts;
    int end = blocks * group * (tile.part + 1) / tile.parts;
    if (params.deterministic && tile.parts <= group) {
      begin -= begin % blocks;
      end -= end % blocks;
    }
    int m_block = first - begin % blocks;
    if (m_block < m_blocks.begin) m_block += blocks;
    return {head + begin / blocks, m_block, end - begin, first};
  }

  // When this tile adds to dQ of a block of queries, among the tiles that see it: in the order of
  // their keys. If they are rotated, the first that begins at this block or a later one is first;
  // behind the last comes the one of the first keys. So tiles that begin at the same time are never
  // at the same block, and none waits for another in a circle.
  __device__ int turn(const BackwardSchedule& schedule, int m_block) const {
    if (schedule.rotated) {
      const int turn = n_block - (m_block * key_tiles() + row_blocks() - 1) / row_blocks();
      return turn < 0 ? turn + key_tiles() : turn;
    }
    const int m_begin = m_block * kBlockM;
    const int m_end = min(m_begin + kBlockM, sequence.seqlen_q);
    return n_block - key_blocks<kBlockN>(mask, m_begin, m_end).begin;
  }

 private:
  // Of the sequence.
  __device__ int row_blocks() const { return (sequence.seqlen_q + kBlockM - 1) / kBlockM; }
  __device__ int key_tiles() const { return (sequence.seqlen_k + kBlockN - 1) / kBlockN; }

  // Where a tile begins if they are rotated, without a mask.
  __device__ int first_block() const { return n_block * row_blocks() / key_tiles(); }
};

}  // namespace flash::sm90
