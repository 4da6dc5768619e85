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
  template <Values kValues>
  static constexpr int kTilesOf =
      count_quantised_tiles(kHeadDim, kFeatures, kValues != Values::kPlain);
  static constexpr int kTiles = std::max(kTilesOf<Values::kPlain>, kTilesOf<Values::kScaled>);

  template <Values kValues, int kChoice, bool kDivided>
  using Config = ForwardConfig<T, __nv_fp8_e4m3, Out, kHeadDim, kHeadDimV, kFeatures, kValues,
                               kChoice, kDivided>;
  using Launcher = ForwardLauncher<Config<Values::kScaled, 0, false>>;

  static Launcher prepare(Params& params, Workspaces& wanted) {
    params.score_scale = params.softmax_scale;
    params.softmax_scale = 1.f;
    const bool scaled = params.v_scale.data != nullptr;
    for (const Scales* scales : {&params.q_scale, &params.k_scale}) {
      if ((scales->data != nullptr) != scaled) {
        throw std::invalid_argument("q_scale, k_scale, v_scale: accepted are all or none");
      }
    }
    if constexpr (std::is_same_v<T, int8_t>) {
      if (!scaled) throw std::invalid_argument("v_scale: missing, as q and k are of int8");
      if (params.v_low.data != nullptr) return prepare_choice<Values::kTwoTerms>(params, wanted);
    } else {
      if (params.v_low.data != nullptr) {
        throw std::invalid_argument("v_low: accepted with q and k of int8 alone");
      }
      if (!scaled) return prepare_choice<Values::kPlain>(params, wanted);
    }
    return prepare_choice<Values::kScaled>(params, wanted);
  }

 private:
  // The tile of `params`, or the last.
  template <Values kValues, int kChoice = 0>
  static Launcher prepare_choice(Params& params, Workspaces& wanted) {
    if constexpr (kChoice + 1 < kTilesOf<kValues>) {
      if (params.tile < 0 || params.tile > kChoice) {
        return prepare_choice<kValues, kChoice + 1>(params, wanted);
      }
    }
    const ForwardPlan plan =
        plan_quantised(params, kFeatures, kHeadDim, kHeadDimV, kValues != Values::kPlain, kChoice,
                       slots_of<Config<kValues, kChoice, true>>);
    params.num_splits = plan.splits;
    return prepare_plan<Config<kValues, kChoice, false>, Config<kValues, kChoice, true>>(
        plan.whole, params, wanted);
  }
};

}  // namespace flash::sm90
