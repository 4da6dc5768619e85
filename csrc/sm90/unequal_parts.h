// How the tiles of a Hopper backward are divided where they differ in length: see unequal_tiles.h.
#pragma once

namespace flash::sm90 {

constexpr int kMostUnequalBlocks = 32;

// Of a head of K and V.
struct UnequalParts {
  int blocks;                         // of keys; 0: all tiles have equally many parts
  int first[kMostUnequalBlocks + 1];  // the first part of each block; behind the last all
};

}  // namespace flash::sm90
