// Tile shapes of the Hopper backward.
#pragma once

namespace flash::sm90 {

struct BackwardTile {
  int block_m;    // queries of one step: 64, or 128 in two halves
  int block_n;    // keys of a tile: 64 for each consumer warpgroup
  int stages;     // of Q and of dO in shared memory
  int ds_stages;  // of dS
  int kv_stages;  // of K and V; 2: the next tile's are loaded beside this one's
  bool k_in_registers, v_in_registers;  // as operands of S^T and dP^T, for all steps of a tile
};

constexpr BackwardTile backward_tile(int headdim) {
  if (headdim <= 64) return {128, 128, 2, 1, 2, true, true};
  if (headdim <= 96) return {64, 128, 2, 2, 1, false, true};
  return {64, 128, 2, 2, 1, false, false};
}

}  // namespace flash::sm90
