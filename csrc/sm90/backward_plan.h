// Into how many parts a Hopper backward divides the steps of its tiles, and how many heads run
// together: what is predicted to take the least time.
#pragma once

#include "params.h"

namespace flash::sm90 {

struct BackwardPlan {
  int splits;
  int section;  // heads of K and V, over all batch entries
};

// For a kernel of these head dims: steps of block_m queries, tiles of block_n keys, each of which a
// `cluster` of thread blocks takes.
BackwardPlan plan_backward(const BackwardParams& params, int block_m, int block_n, int cluster,
                           int headdim, int headdim_v);

}  // namespace flash::sm90
