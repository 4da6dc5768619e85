// Launches the pass before attention of operands in 8 bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/quantise_kernel.cuh"
#include "sm90/transposed_values.cuh"

namespace flash::sm90 {

// T: of q, k and v; e4m3: v alone is transposed. Quantised: of q and k afterwards.
template <typename T, typename Quantised, typename Values, int kHeadDim, int, FeatureSet>
struct QuantiseRow {
  using Params = QuantiseParams;
  static constexpr uint32_t kTakes = 0;
  static constexpr int kTiles = 1;
  static constexpr const char* kCall = "launch of the sm90 quantise kernel";

  static auto prepare(Params& params, Workspaces&) {
    if constexpr (sizeof(T) == 1) {
      const int64_t tiles = tiles_of_keys(params);
      if (tiles > std::numeric_limits<int>::max()) {
        throw std::invalid_argument("v: got " + std::to_string(tiles) +
                                    " blocks of rows; accepted: up to 2^31 - 1");
      }
      return [grid = dim3(tiles)](const QuantiseParams& bound, cudaStream_t stream) {
        launch_overlapping(transpose_kernel<kHeadDim>, grid, kTransposeThreads, size_t{0}, stream,
                           kCall, bound);
      };
    } else {
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
  }
};

}  // namespace flash::sm90
