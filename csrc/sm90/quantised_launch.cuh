// Launches the Hopper forward of operands in 8 bits.
#pragma once

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "kernel.h"
#include "params.h"
#include "sm90/forward_launch.cuh"
#include "sm90/transpose_launch.cuh"

namespace flash::sm90 {

// T: int8 or e4m3, of q and k in the products. V is e4m3, or beside int8 of the type of the result.
template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct QuantisedRow {
  static_assert(std::is_same_v<T, KV>);
  using Params = QuantisedParams;
  static constexpr uint32_t kTakes = features_of(kFeatures) & ~(kDropout | kPlace);
  // Tile 0 finds values of e4m3 transposed, tile 1 transposes them. (Of 192 columns a warp would
  // have three squares, and too few registers, as in the full set.)
  static constexpr bool kMayTranspose = std::is_same_v<T, __nv_fp8_e4m3> &&
                                        kFeatures == FeatureSet::kPlain &&
                                        kHeadDimV % kSquareRows == 0 && kHeadDimV != 192;
  static constexpr int kTiles = kMayTranspose ? 2 : 1;

  template <Values kValues, bool kDivided>
  using Config =
      ForwardConfig<T, std::conditional_t<kValues == Values::kOf16Bits, Out, __nv_fp8_e4m3>, Out,
                    kHeadDim, kHeadDimV, kFeatures, kValues, 0, kDivided>;
  using Launcher = ForwardLauncher<Config<Values::kScaled, false>>;

  static Launcher prepare(Params& params, Workspaces& wanted) {
    params.score_scale = params.softmax_scale;
    params.softmax_scale = 1.f;
    const bool scaled = params.k_scale.data != nullptr;
    const bool scaled_values = params.v_scale.data != nullptr;
    if (scaled_values && !scaled) {
      throw std::invalid_argument("k_scale: missing, as v has scales");
    }
    if constexpr (std::is_same_v<T, int8_t>) {
      if (!scaled) throw std::invalid_argument("k_scale: missing, as q and k are of int8");
      if (!scaled_values) return prepare_values<Values::kOf16Bits>(params, wanted);
    } else {
      if (scaled != scaled_values) {
        throw std::invalid_argument("v_scale: missing, as v is of e4m3");
      }
      if (!scaled) return prepare_values<Values::kPlain>(params, wanted);
    }
    return prepare_values<Values::kScaled>(params, wanted);
  }

 private:
  template <Values kValues>
  static Launcher prepare_values(Params& params, Workspaces& wanted) {
    using Divided = Config<kValues, true>;
    constexpr bool kIsRaw = kValues == Values::kPlain;
    int transposed_keys = 0;
    if constexpr (kIsRaw && kMayTranspose) {
      transposed_keys = Config<Values::kRows, false>::kSums ? INT_MAX : kSummedKeys;
    }
    const ForwardPlan plan = plan_quantised(params, kFeatures, kHeadDim, kHeadDimV, Divided::kTile,
                                            transposed_keys, slots_of<Divided>);
    if constexpr (kIsRaw && kMayTranspose) {
      if (plan.tile == 1) {
        return prepare_plan<Config<Values::kRows, false>, Config<Values::kRows, true>>(plan, params,
                                                                                       wanted);
      }
    }
    auto attend = prepare_plan<Config<kValues, false>, Divided>(plan, params, wanted);
    if constexpr (kIsRaw) {
      return [transpose = prepare_transpose<kHeadDimV>(params, wanted), attend](
                 const Params& bound, cudaStream_t stream) {
        transpose(bound, stream);
        attend(bound, stream);
      };
    } else {
      return attend;
    }
  }
};

}  // namespace flash::sm90
