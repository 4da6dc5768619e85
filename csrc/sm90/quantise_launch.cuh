// Launches the pass before attention of operands in 8 bits.
#pragma once

#include <algorithm>
#include <atomic>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/quantise_kernel.cuh"

namespace flash::sm90 {

// T: of q, k and v. Quantised: of q and k afterwards.
template <typename T, typename Quantised, typename Values, int kHeadDim, int, FeatureSet>
struct QuantiseRow {
  using Params = QuantiseParams;
  static constexpr uint32_t kTakes = 0;
  static constexpr int kTiles = 1;
  static constexpr const char* kCall = "launch of the sm90 quantise kernel";

  static auto prepare(Params& params, Workspaces&) {
    using Config = QuantiseConfig<T, Quantised, kHeadDim>;
    static std::atomic<uint64_t> devices{0};
    allow_shared_memory(quantise_kernel<Config>, sizeof(typename Config::Shared), devices);
    const int64_t at_a_time = int64_t{Config::kBlocks} * multiprocessors();
    const auto grid = static_cast<unsigned>(std::min(count_tiles(params), at_a_time));
    return [grid](const QuantiseParams& bound, cudaStream_t stream) {
      launch_overlapping(quantise_kernel<Config>, dim3(grid), Config::kThreads,
                         sizeof(typename Config::Shared), stream, kCall, bound);
    };
  }
};

}  // namespace flash::sm90
