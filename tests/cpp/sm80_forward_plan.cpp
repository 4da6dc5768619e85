// The plan of the Ampere-class forward (sm80/forward_plan.h) on an H200: of each shape it reads and
// prints the tile shape and into how many parts the keys of a tile are divided.
#include <cstdio>
#include <utility>

#include "h200_on_host.h"
#include "sm80/forward_plan.h"

using namespace flash;
using namespace flash::sm80;

template <int kHeadDim, int kHeadDimV, int... kChoices>
ForwardPlan plan(const ForwardParams& params, std::integer_sequence<int, kChoices...>) {
  using Element = uint16_t;
  constexpr ForwardShape kShapes[] = {
      {forward_tile(kHeadDim, kHeadDimV, kChoices),
       ForwardConfig<Element, kHeadDim, kHeadDimV, FeatureSet::kPlain, kChoices, false,
                     false>::kSharedBytes}...};
  return plan_forward(params, kHeadDimV, kShapes);
}

template <int kHeadDim, int kHeadDimV = kHeadDim>
ForwardPlan plan(const ForwardParams& params) {
  constexpr int kTiles = count_forward_tiles(kHeadDim, kHeadDimV);
  return plan<kHeadDim, kHeadDimV>(params, std::make_integer_sequence<int, kTiles>());
}

int main() {
  int batch, seqlen_q, seqlen_k, nheads, headdim, headdim_v, causal;
  while (std::scanf("%d %d %d %d %d %d %d", &batch, &seqlen_q, &seqlen_k, &nheads, &headdim,
                    &headdim_v, &causal) == 7) {
    ForwardParams params = dense_forward(batch, seqlen_q, seqlen_k, nheads, nheads, causal);
    params.shared_memory = 227 << 10;
    ForwardPlan chosen{};
    if (headdim <= 32) {
      chosen = plan<32>(params);
    } else if (headdim <= 64) {
      chosen = plan<64>(params);
    } else if (headdim <= 96) {
      chosen = plan<96>(params);
    } else if (headdim <= 128) {
      chosen = plan<128>(params);
    } else if (headdim > 192) {
      chosen = plan<256>(params);
    } else {
      chosen = headdim_v <= 128 ? plan<192, 128>(params) : plan<192>(params);
    }
    std::printf("%dx%d\n", chosen.tile, chosen.splits);
  }
}
