// Which tile shape a Hopper forward runs with and into how many parts the keys of a tile are
// divided: what is predicted to take the least time.
#pragma once

#include "params.h"

namespace flash::sm90 {

struct ForwardPlan {
  int tile;
  int splits;
};

// Of what the parameters leave open; for a kernel of these head dims and features.
ForwardPlan plan_forward(const ForwardParams& params, FeatureSet features, int headdim,
                         int headdim_v);

// Heads of a tile of block_m rows: 1, or all of a group if that saves tiles. With one query a tile
// is nearly empty otherwise.
int heads_in_tile(const ForwardParams& params, FeatureSet features, int block_m);

}  // namespace flash::sm90
