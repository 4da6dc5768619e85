// Tile shapes of the Hopper forward.
#pragma once

#include "params.h"

namespace flash::sm90 {

struct ForwardTile {
  int block_m;      // queries of a tile: 64 for each consumer warpgroup; 0: there is no such tile
  int block_n;      // keys of one step
  int stages;       // of K and of V in shared memory
  int q_stages;     // of Q; 2: the next tile's is loaded beside this one's
  int streams = 1;  // of tiles, that a thread block works on at the same time
  int q_steps = 0;  // of Q, 16 columns each, that consumers keep in registers
};

// The tile shapes of a kernel, counted from 0: forward_plan.cpp chooses between them. 128 queries
// in two warpgroups, which leave registers for wide blocks of keys; or 192 in three where the
// output is narrow enough, which reads K and V less often. Where a tile needs few registers, two
// streams of tiles, which know nothing of each other: what one does at the ends of a tile, when its
// warps wait for each other, is hidden behind the other's. docs/design-notes.md has figures of
// these and of others.
constexpr ForwardTile forward_tile(int headdim, int headdim_v, FeatureSet features, int choice) {
  const bool plain = features == FeatureSet::kPlain;  // the full set needs more registers
  switch (headdim) {
    case 64:
      if (choice == 0) return {128, 64, 4, 2, 2};
      if (choice == 1 && plain) return {128, 128, 2, 2};
      if (choice == 2 && plain) return {192, 128, 2, 2};
      break;
    case 96:
      if (choice == 0) return plain ? ForwardTile{128, 48, 3, 1, 2} : ForwardTile{128, 96, 2, 2};
      if (choice == 1 && plain) return {192, 96, 2, 1};
      break;
    case 128:
      if (choice == 0) return {128, 128, 2, 2, 1, plain ? 8 : 0};
      if (choice == 1 && plain) return {192, 64, 3, 2};
      break;
    case 192:
      if (headdim_v == 128) {
        if (choice == 0) return {128, 128, 2, 1, 1, plain ? 8 : 0};
        if (choice == 1 && plain) return {128, 64, 3, 2};
      } else {
        if (choice == 0) return {128, 96, 2, 1, 1, plain ? 8 : 0};
        if (choice == 1) return {128, 64, 2, 2};
      }
      break;
    default:
      if (choice == 0) return {128, 64, 2, 1};
      break;
  }
  return {};
}

// What the values of quantised keys are: e4m3, with a scale for each block or plain; plain ones
// that the kernel itself transposes; or of 16 bits.
enum class Values { kPlain, kRows, kScaled, kOf16Bits };

// The tile shape of operands in 8 bits. A block of keys, 64 or 128 of them, is a row of the
// transposed values in shared memory. It may have scales of its own.
constexpr ForwardTile quantised_tile(int headdim, FeatureSet features, Values values) {
  const bool plain = features == FeatureSet::kPlain, of_16_bits = values == Values::kOf16Bits;
  switch (headdim) {
    case 64:
      return plain ? ForwardTile{192, 128, 4, 2} : ForwardTile{128, 128, 3, 2};
    case 96:
      if (of_16_bits && plain) return {192, 64, 4, 2};
      return {128, 128, of_16_bits ? 3 : 4, 2};
    case 128:
      if (of_16_bits && plain) return {192, 64, 4, 2};
      return {128, 128, of_16_bits ? 3 : 4, 2};
    case 192:
      if (of_16_bits) return {128, 64, 4, 1};
      return plain ? ForwardTile{128, 128, 2, 1} : ForwardTile{128, 64, 3, 1};
    default:
      return of_16_bits ? ForwardTile{128, 64, 4, 1} : ForwardTile{128, 64, 3, 1};
  }
}

constexpr int count_forward_tiles(int headdim, int headdim_v, FeatureSet features) {
  int count = 0;
  while (forward_tile(headdim, headdim_v, features, count).block_m > 0) ++count;
  return count;
}

}  // namespace flash::sm90
