// Which tile shape a Hopper forward runs with and into how many parts the keys of a tile are
// divided: what is predicted to take the least time.
#pragma once

#include "params.h"

namespace flash::sm90 {

constexpr int kMostSplits = 16;  // thread blocks of the largest cluster

struct ForwardPlan {
  int tile;
  int splits;
};

// Of what the parameters leave open; for a kernel of these head dims and features.
// slots_of(parts): thread blocks that run at a time, in clusters of so many
ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                         int headdim_v, int (*slots_of)(int parts));

// Heads of a tile of block_m rows: 1, or all of a group if that saves tiles. With one query a tile
// is nearly empty otherwise.
int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m);

}  // namespace flash::sm90
