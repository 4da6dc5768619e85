// What the plan of the Hopper backward (sm90/backward_plan.cpp) has idle warps do on an H200: of
// each dense shape at head dim 128 it reads and prints the fields of IdleWork.
#include "sm90/backward_plan.cpp"

#include <cstdio>

#include "h200_on_host.h"

using namespace flash;
using namespace flash::sm90;

int main() {
  constexpr int kBlockM = 64, kBlockN = 128, kHeadDim = 128, kWorkers = 132;
  int batch, seqlen, nheads, nheads_kv, causal, head_steps;
  while (std::scanf("%d %d %d %d %d %d", &batch, &seqlen, &nheads, &nheads_kv, &causal,
                    &head_steps) == 6) {
    BackwardParams params{};
    static_cast<AttentionParams&>(params) =
        dense_forward(batch, seqlen, seqlen, nheads, nheads_kv, causal);
    params.headdim = params.headdim_v = kHeadDim;
    const BackwardPlan plan = plan_backward(params, kBlockM, kBlockN, kWorkers, kHeadDim, kHeadDim);
    const IdleWork work = plan_idle_work(params, plan, head_steps, kBlockM, kBlockN, kWorkers);
    std::printf("%d %d %d %d %d\n", work.head_steps, work.head_tiles, work.tiles, work.cleared,
                work.ahead);
  }
}
