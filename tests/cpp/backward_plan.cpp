// What the plan of the Hopper backward (sm90/backward_plan.cpp) has idle warps do on an H200: of
// each shape at a head dim, with the workers that there are, it prints the fields of IdleWork,
// whether steps have 80 queries, whether thread blocks take whole heads, and of each block of keys
// the parts of its tile, if tiles have unequally many. Sequences are packed if they have a total.
#include "sm90/backward_plan.cpp"

#include <cstdio>

#include "h200_on_host.h"
#include "sm90/backward_tile.h"

using namespace flash;
using namespace flash::sm90;

int main() {
  int headdim, batch, seqlen, total, nheads, nheads_kv, causal, head_steps, workers;
  while (std::scanf("%d %d %d %d %d %d %d %d %d", &headdim, &batch, &seqlen, &total, &nheads,
                    &nheads_kv, &causal, &head_steps, &workers) == 9) {
    const BackwardTile tile = backward_tile(headdim);
    BackwardParams params{};
    static_cast<AttentionParams&>(params) =
        dense_forward(batch, seqlen, seqlen, nheads, nheads_kv, causal);
    params.headdim = params.headdim_v = headdim;
    const int bounds[1] = {};
    if (total > 0) params.cu_seqlens_q = params.cu_seqlens_k = bounds;
    params.total_q = params.total_k = total;
    const BackwardPlan plan =
        plan_backward(params, tile.block_m, tile.block_n, workers, headdim, headdim);
    const IdleWork work =
        plan_idle_work(params, plan, head_steps, tile.block_m, tile.block_n, workers);
    const bool whole_heads =
        takes_whole_heads(params, tile.block_m, tile.block_n, workers, headdim, headdim);
    std::printf("%d %d %d %d %d %d %d", work.head_steps, work.head_tiles, work.tiles, work.cleared,
                work.ahead, takes_long_steps(params), whole_heads);
    const UnequalParts& unequal = plan.unequal;
    for (int i = 0; i < unequal.blocks; ++i) {
      std::printf(" %d", unequal.first[i + 1] - unequal.first[i]);
    }
    std::printf("\n");
  }
}
