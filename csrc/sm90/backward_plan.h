// Which tiles of a Hopper backward have their steps divided, into how many parts, and how many
// heads run together: what is predicted to take the least time. And what idle warps do.
#pragma once

#include <cstdint>

#include "common/unequal_parts.h"
#include "params.h"
#include "sm90/idle_work.h"

namespace flash::sm90 {

struct BackwardPlan {
  int splits;   // parts of a divided tile
  int section;  // heads of K and V, over all batch entries; each part of a divided one counts
  int whole;    // tiles that are not divided: the first ones
  UnequalParts unequal;  // if it has any, all tiles have these parts instead
};

// For a kernel of these head dims: steps of block_m queries, tiles of block_n keys; so many workers
// take one tile after the other.
BackwardPlan plan_backward(const BackwardParams& params, int block_m, int block_n, int workers,
                           int headdim, int headdim_v);

// Whether some query may not see some key of its sequence.
bool is_masked(const BackwardParams& params);

// Whether steps have 80 queries, see long_backward_config.cuh.
bool takes_long_steps(const BackwardParams& params);

// Of a launch by this plan, if sequences are dense and dQ is not added to in order.
// head_steps: of all tiles of the heads that share K and V
IdleWork plan_idle_work(const BackwardParams& params, const BackwardPlan& plan, int64_t head_steps,
                        int block_m, int block_n, int workers);

// Whether thread blocks take whole heads, see BackwardSchedule, if sequences are dense or packed.
bool takes_whole_heads(const BackwardParams& params, int block_m, int block_n, int workers,
                       int headdim, int headdim_v);

}  // namespace flash::sm90
