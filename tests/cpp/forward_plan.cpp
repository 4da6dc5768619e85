// The plan of the Hopper forward (sm90/forward_plan.cpp) on an H200: of each shape it reads and
// prints the tile and how many parts its keys are divided into, as benchmarks/tiles.py does; or
// that there are more tiles than a launch counts.
#include "sm90/forward_plan.cpp"

#include <cstdio>

#include "h200_on_host.h"

using namespace flash;
using namespace flash::sm90;

// Clusters that run at a time, by their size.
constexpr int kClusters[] = {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};

int main() {
  int level, batch, seqlen_q, seqlen_k, nheads, nheads_kv, headdim, causal;
  while (std::scanf("%d %d %d %d %d %d %d %d", &level, &batch, &seqlen_q, &seqlen_k, &nheads,
                    &nheads_kv, &headdim, &causal) == 8) {
    const ForwardParams params =
        dense_forward(batch, seqlen_q, seqlen_k, nheads, nheads_kv, causal);
    const auto slots_of = [](int parts) { return parts * kClusters[parts - 1]; };
    ForwardPlan plan{};
    try {
      if (level == 4) {
        plan = plan_forward(params, FeatureSet::kPlain, std::max(headdim, 64),
                            std::max(headdim, 64), slots_of);
      } else {
        const bool raw = level == 0;  // e4m3; else fast, balanced, accurate
        const Values values = raw         ? Values::kPlain
                              : level < 3 ? Values::kScaled
                                          : Values::kOf16Bits;
        const ForwardTile tile = quantised_tile(headdim, FeatureSet::kPlain, values);
        const int transposed_keys = !raw || headdim % 64 != 0 || headdim == 192 ? 0
                                    : headdim == 256                            ? 1024
                                                                                : INT_MAX;
        plan = plan_quantised(params, FeatureSet::kPlain, headdim, headdim, tile, transposed_keys,
                              slots_of);
      }
    } catch (const std::invalid_argument&) {
      std::printf("refused\n");
      continue;
    }
    std::printf("%dx%d\n", plan.tile,
                plan.whole > 0 ? -plan.splits
                : plan.apart   ? kApart - plan.splits
                               : plan.splits);
  }
}
