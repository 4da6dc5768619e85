// A tile of the Hopper forward: its queries, and the keys that they see.
#pragma once

#include "common/divisor.h"
#include "common/mask.h"
#include "common/sequence.h"
#include "params.h"
#include "sm90/dense_tiles.h"
#include "sm90/key_blocks.cuh"

namespace flash::sm90 {

// The rows of a tile: `rows` queries of `group` heads each, heads fastest.
struct TileRows {
  int rows;
  int group;                  // 1, or all query heads that read the same keys
  unsigned group_reciprocal;  // row * this >> 16 = row / group

  // Of a row: its query, from the tile's first on, and its head, if the tile's first is `head`.
  __device__ int query_of(int row) const { return static_cast<int>(row * group_reciprocal >> 16); }
  __device__ int head_of(int head, int row) const { return (head - query_of(row)) * group + row; }
};

// What the host decides about a launch.
struct ForwardSchedule : TileRows, TileSchedule {
  Divisor page_size;       // 1 if there are no pages
  int key_box_rows;        // keys that one box of TMA holds; divides kBlockN
  bool draw_early;         // with one stream: the next tile is drawn before it is wanted
  bool clear_tail;         // there may be anything but zeros behind a sequence's last value
  bool lengths_on_device;  // to know a tile's keys, device memory is read
  bool boxes_out;          // the rows of a warp are a box of the output
  bool apart;              // the parts of a divided tile are no cluster
  bool mixed;              // some sequences may decode, where others have several blocks of queries
  bool together;           // packed sequences take turns: see TileScheduler
};

// One tile: queries m_begin .. m_end - 1 and the blocks of keys of which one of them sees some, or
// a part of those.
template <int kBlockN, bool kFull, bool kMayBePart>
struct TileRange {
  Sequence sequence;
  int m_begin, m_end;
  int position, last_position;  // of queries m_begin and m_end - 1 among the keys
  Mask mask;                    // of positions: its shift is 0
  KeyBlocks<kBlockN, kFull> blocks;

  __device__ TileRange(const ForwardParams& params, const ForwardSchedule& schedule,
                       const Tile& tile)
      : sequence(params, tile.batch),
        m_begin(tile.block * schedule.rows),
        m_end(min(m_begin + schedule.rows, sequence.seqlen_q)),
        position(m_begin + sequence.seqlen_k - sequence.seqlen_q),
        last_position(position + m_end - m_begin - 1),
        mask{sequence.seqlen_k, 0, params.window_left, params.window_right},
        blocks(mask.first_key(position), mask.end_key(last_position), tile.part,
               kMayBePart ? schedule.splits : 1) {
    // ALiBi prefers near keys: coming from far ones, every block would outgrow the last.
    if (kFull && params.alibi_slopes != nullptr) blocks.start_at(last_position);
  }
};

// A tile with its range, for warps that had better not find it themselves.
template <typename Range>
struct RangedTile : Tile {
  Range range;  // unless there is no tile

  // (Written at once, the tile leaves its registers to the range.)
  __device__ void set(const ForwardParams& params, const ForwardSchedule& schedule,
                      const Tile& tile) {
    static_cast<Tile&>(*this) = tile;
    if (tile.batch >= 0) range = Range(params, schedule, tile);
  }
};

}  // namespace flash::sm90
