// Launches the pass before attention of operands in 8 bits.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/quantise_kernel.cuh"

namespace flash::sm90 {

// T: of q, k and v; e4m3: v alone is transposed. Quantised: of q and k afterwards.
template <typename T, typename Quantised, typename Values, int kHeadDim, int, FeatureSet>
struct QuantiseRow {
  using Params = QuantiseParams;
  static constexpr uint32_t kTakes = 0;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    const bool packed = params.cu_seqlens_k != nullptr;
    const int64_t of_keys =
        int64_t{1} * params.blocks * params.nheads_kv * (packed ? 1 : params.batch);
    const int64_t of_queries = int64_t{1} * ((params.seqlen_q + kScaledKeys - 1) / kScaledKeys) *
                               params.nheads * params.batch_q;
    const int64_t grid = sizeof(T) == 1 ? of_keys : 2 * of_keys + of_queries;
    if (grid > std::numeric_limits<int>::max()) {
      throw std::invalid_argument("q, k, v: got " + std::to_string(grid) +
                                  " blocks of rows; accepted: up to 2^31 - 1");
    }
    return [grid = static_cast<int>(grid)](const QuantiseParams& bound, cudaStream_t stream) {
      launch_overlapping(quantise_kernel<T, Quantised, kHeadDim>, dim3(grid), kQuantiseThreads,
                         size_t{0}, stream, "launch of the sm90 quantise kernel", bound);
    };
  }
};

}  // namespace flash::sm90
