// Launches the pass before attention of operands in 8 bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <functional>
#include <stdexcept>
#include <string>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/quantise_kernel.cuh"

namespace flash::sm90 {

// Wider heads had better get their rotary embedding in a launch of its own.
constexpr int kMostRotated = 128;

// T: of q, k and v. Quantised: of k afterwards.
template <typename T, typename Quantised, typename Values, int kHeadDim, int, FeatureSet>
struct QuantiseRow {
  using Params = QuantiseParams;
  static constexpr uint32_t kTakes = 0;
  static constexpr int kTiles = 1;
  static constexpr const char* kCall = "launch of the sm90 quantise kernel";
  using Launcher = std::function<void(const Params&, cudaStream_t)>;

  static Launcher prepare(Params& params, Workspaces&) {
    const int64_t of_keys = tiles_of_keys(params),
                  of_values = params.v.data == nullptr ? 0 : of_keys;
    const int64_t tiles = of_values + of_keys + tiles_of_queries(params);
    if (tiles > INT_MAX) {
      throw std::invalid_argument("q, k: got " + std::to_string(tiles) +
                                  " blocks of rows; accepted: up to 2^31 - 1");
    }
    params.tiles_v = static_cast<int>(of_values), params.tiles_k = static_cast<int>(of_keys);
    params.tiles = static_cast<int>(tiles);
    if (params.rotation.cos == nullptr) return prepare_kernel<false>(params);
    if constexpr (kHeadDim <= kMostRotated) return prepare_kernel<true>(params);
    throw std::invalid_argument("rotary_cos: accepted with head dimensions up to " +
                                std::to_string(kMostRotated));
  }

 private:
  template <bool kRotary>
  static Launcher prepare_kernel(const Params& params) {
    using Config = QuantiseConfig<T, Quantised, kHeadDim, kRotary>;
    static std::atomic<uint64_t> devices{0};
    allow_shared_memory(quantise_kernel<Config>, sizeof(typename Config::Shared), devices);
    const int grid = std::min(params.tiles, Config::kBlocks * multiprocessors());
    return [grid](const QuantiseParams& bound, cudaStream_t stream) {
      launch_overlapping(quantise_kernel<Config>, dim3(grid), Config::kThreads,
                         sizeof(typename Config::Shared), stream, kCall, bound);
    };
  }
};

}  // namespace flash::sm90
