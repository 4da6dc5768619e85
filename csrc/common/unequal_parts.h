// How the tiles of a backward, blocks of keys, are divided where they differ in length. Under a
// causal mask the first keys are seen by most queries. A longer tile has more parts, so that all
// parts are about equally long.
#pragma once

namespace flash {

constexpr int kMostUnequalBlocks = 32;

// Of a head of K and V.
struct UnequalParts {
  int blocks;                         // of keys; 0: all tiles have equally many parts
  int first[kMostUnequalBlocks + 1];  // the first part of each block; behind the last all
};

}  // namespace flash
