// Launches the Hopper forward of operands in 8 bits.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "kernel.h"
#include "params.h"
#include "sm90/forward_launch.cuh"

namespace flash::sm90 {

// T: int8 or e4m3, of q and k. V is e4m3.
template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct QuantisedRow {
  static_assert(std::is_same_v<T, KV>);
  using Params = QuantisedParams;
  static constexpr uint32_t kTakes = features_of(kFeatures) & ~(kDropout | kPlace);
  static constexpr int kTiles = count_quantised_tiles(kHeadDim, kFeatures);
  static constexpr bool kTwoTerms = std::is_same_v<T, int8_t>;

  template <int kTerms, int kChoice, bool kDivided>
  using Config = ForwardConfig<T, __nv_fp8_e4m3, Out, kHeadDim, kHeadDimV, kFeatures, kTerms,
                               kChoice, kDivided>;
  using Launcher = ForwardLauncher<Config<1, 0, false>>;

  static Launcher prepare(Params& params, Workspaces& wanted) {
    params.score_scale = params.softmax_scale;
    params.softmax_scale = 1.f;
    if (params.tile < 0) params.tile = kTiles - 1;
    if (params.v_low.data == nullptr) return prepare_choice<1>(params, wanted);
    if constexpr (kTwoTerms) return prepare_choice<2>(params, wanted);
    throw std::invalid_argument("v_low: accepted with q and k of int8 alone");
  }

 private:
  template <int kTerms, int kChoice = 0>
  static Launcher prepare_choice(Params& params, Workspaces& wanted) {
    if constexpr (kChoice + 1 < kTiles) {
      if (params.tile > kChoice) return prepare_choice<kTerms, kChoice + 1>(params, wanted);
    }
    const ForwardPlan plan = plan_quantised(params, kFeatures, kHeadDim, kHeadDimV, kChoice,
                                            slots_of<Config<kTerms, kChoice, true>>);
    params.num_splits = plan.splits;
    return prepare_plan<Config<kTerms, kChoice, false>, Config<kTerms, kChoice, true>>(
        plan.whole, params, wanted);
  }
};

}  // namespace flash::sm90
