// Launches the Hopper forward of operands in 8 bits.
#pragma once

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/forward_launch.cuh"
#include "sm90/transposed_values.cuh"

namespace flash::sm90 {

// T: int8 or e4m3, of q and k in the products. V is e4m3, or beside int8 of the type of the result.
template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct QuantisedRow {
  static_assert(std::is_same_v<T, KV>);
  using Params = QuantisedParams;
  static constexpr uint32_t kTakes = features_of(kFeatures) & ~(kDropout | kPlace);
  static constexpr int kTiles = 1;

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
    const ForwardPlan plan =
        plan_quantised(params, kFeatures, kHeadDim, kHeadDimV, Divided::kTile, slots_of<Divided>);
    params.num_splits = plan.splits;
    auto attend = prepare_plan<Config<kValues, false>, Divided>(plan.whole, params, wanted);
    if constexpr (kValues == Values::kPlain) {
      return [transpose = prepare_transpose(params, wanted), attend](const Params& bound,
                                                                     cudaStream_t stream) {
        transpose(bound, stream);
        attend(bound, stream);
      };
    } else {
      return attend;
    }
  }

  // The launch that transposes raw values, into a workspace.
  static Launcher prepare_transpose(const Params& params, Workspaces& wanted) {
    QuantiseParams values{};
    values.v = params.raw_v, values.v_out = params.v;
    values.batch = params.batch, values.seqlen_k = params.seqlen_k;
    values.total_k = params.total_k, values.blocks = params.places_v / kScaledKeys;
    values.nheads_kv = params.nheads_kv, values.headdim_v = params.headdim_v;
    values.cu_seqlens_k = params.cu_seqlens_k;
    const int64_t tiles = tiles_of_keys(values);
    if (tiles > INT_MAX) {
      throw std::invalid_argument("v: got " + std::to_string(tiles) +
                                  " blocks of rows; accepted: up to 2^31 - 1");
    }
    wanted.add("transposed_v", reinterpret_cast<uint8_t* const&>(params.v.data),
               tiles * kScaledKeys * params.headdim_v);
    return [values, tiles](const Params& bound, cudaStream_t stream) {
      QuantiseParams found = values;
      found.v.data = bound.raw_v.data, found.v_out.data = bound.v.data;
      found.cu_seqlens_k = bound.cu_seqlens_k, found.seqused_k = bound.seqused_k;
      launch_overlapping(transpose_kernel<kHeadDimV>, static_cast<int>(tiles), kTransposeThreads,
                         size_t{0}, stream, "launch of the sm90 transpose kernel", found);
    };
  }
};

}  // namespace flash::sm90
