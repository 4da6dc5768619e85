// Tiles of a Hopper backward with unequally many parts. The schedule counts the parts of a head as
// its blocks. Those of the first keys are handed out first.
#pragma once

#include "common/block_of_part.h"
#include "sm90/dense_tiles.h"

namespace flash::sm90 {

// Makes a tile of a head the one with these keys, and its first part.
__device__ inline void set_keys(const TileSchedule& schedule, const UnequalParts& unequal,
                                int n_block, Tile& tile) {
  const int first = unequal.first[n_block];
  tile.block = schedule.blocks - 1 - n_block;
  tile.part = 0;
  tile.parts = unequal.first[n_block + 1] - first;
  tile.place = (tile.batch * schedule.heads + tile.head) * schedule.blocks + first;
}

// The part that the scheduler has as a tile.
__device__ inline Tile unequal_part(const TileSchedule& schedule, const UnequalParts& unequal,
                                    Tile tile) {
  const int part = schedule.blocks - 1 - tile.block, n_block = block_of_part(unequal, part);
  set_keys(schedule, unequal, n_block, tile);
  tile.part = part - unequal.first[n_block];
  return tile;
}

// Tile `number` of all heads, with its first part.
__device__ inline Tile unequal_tile(const TileSchedule& schedule, const UnequalParts& unequal,
                                    int number) {
  const int batch_head = number / unequal.blocks;
  const int batch = schedule.of_heads.quotient(batch_head);
  const int head = batch_head - batch * schedule.heads;
  Tile tile{0, head, schedule.of_heads_of_kv.quotient(head), batch};
  set_keys(schedule, unequal, number - batch_head * unequal.blocks, tile);
  return tile;
}

}  // namespace flash::sm90
