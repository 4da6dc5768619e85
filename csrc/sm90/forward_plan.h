// Which tile shape a Hopper forward runs with and into how many parts the keys of a tile are
// divided: what is predicted to take the least time. All tiles are divided, or those alone that are
// left over when each SM has had equally many.
#pragma once

#include "params.h"
#include "sm90/forward_tile.h"

namespace flash::sm90 {

constexpr int kMostSplits = 16;  // thread blocks of the largest cluster
constexpr int kMostApart = 32;   // parts of a tile that are no cluster

struct ForwardPlan {
  int tile;
  int splits;
  int whole;           // where some are divided, those that are not: 0, or as many for each SM
  bool apart = false;  // the parts of a tile are no cluster: another kernel merges them
};

// slots_of(parts): thread blocks that run at a time, in clusters of so many
using SlotsOf = int (*)(int parts);

// With num_splits of kApart - n all tiles are divided into n parts that are no clusters, with -n
// tiles left over.
constexpr int kApart = -64;

// Of what the parameters leave open; for a kernel of these head dims and features.
ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                         int headdim_v, SlotsOf slots_of);

// The same of operands in 8 bits, with this tile shape. Tile 1 has that shape too, but transposes
// values of e4m3 itself: of undivided keys at most so many. If 0, there is no such tile.
ForwardPlan plan_quantised(const ForwardParams& params, FeatureSet features, int headdim,
                           int headdim_v, const ForwardTile& tile, int transposed_keys,
                           SlotsOf slots_of);

// Heads of a tile of block_m rows: 1, or all of a group if that saves tiles. With one query a tile
// is nearly empty otherwise.
int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m);

}  // namespace flash::sm90
