// What idle warps of the Hopper backward are to do in a launch: see idle_warps.cuh.
#pragma once

namespace flash::sm90 {

constexpr int kMostHeadTiles = 64;  // row tiles of a whole head, see BackwardSchedule

// Row tiles of the workspace of dQ are counted in the order of batch entries, heads and rows.
struct IdleWork {
  int head_steps;  // that add to dQ of the heads that share K and V; 0: idle warps do nothing
  int head_tiles;  // row tiles of these heads
  int tiles;       // row tiles in all
  int cleared;     // the first so many are cleared by the rows kernel, the others by idle warps,
  int ahead;       // which go so far ahead of the heads at work
};

}  // namespace flash::sm90
