// What the plan of the Hopper backward (sm90/backward_plan.cpp) has idle warps do on an H200: of
// each dense shape at head dim 128, with the workers that there are, it reads and prints the fields
// of IdleWork, and whether thread blocks take whole heads.
#include "sm90/backward_plan.cpp"

#include <cstdio>

#include "h200_on_host.h"

using namespace flash;
using namespace flash::sm90;

int main() {
  constexpr int kBlockM = 64, kBlockN = 128, kHeadDim = 128;
  int batch, seqlen, nheads, nheads_kv, causal, head_steps, workers;
  while (std::scanf("%d %d %d %d %d %d %d", &batch, &seqlen, &nheads, &nheads_kv, &causal,
                    &head_steps, &workers) == 7) {
    BackwardParams params{};
    static_cast<AttentionParams&>(params) =
        dense_forward(batch, seqlen, seqlen, nheads, nheads_kv, causal);
    params.headdim = params.headdim_v = kHeadDim;
    const BackwardPlan plan = plan_backward(params, kBlockM, kBlockN, workers, kHeadDim, kHeadDim);
    const IdleWork work = plan_idle_work(params, plan, head_steps, kBlockM, kBlockN, workers);
    const bool whole_heads =
        takes_whole_heads(params, head_steps, kBlockM, kBlockN, workers, kHeadDim, kHeadDim);
    std::printf("%d %d %d %d %d %d\n", work.head_steps, work.head_tiles, work.tiles, work.cleared,
                work.ahead, whole_heads);
  }
}
