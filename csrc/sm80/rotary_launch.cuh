// Launches the rotary embedding.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/rotary.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/rotary_kernel.cuh"

namespace flash::sm80 {

template <typename T, typename Table, int kPairs>
void launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  const dim3 block = token_block(params.headdim, params.rotation.pairs, params.nheads, kPairs);
  const bool packed = params.cu_seqlens != nullptr;
  const dim3 grid((params.seqlen + block.z - 1) / block.z,
                  packed ? 1 : std::min(params.batch, kMaxGrid));
  rotary_kernel<T, Table, kPairs><<<grid, block, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the rotary kernel");
}

template <typename T, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct RotaryRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = RotaryParams;
  static constexpr uint32_t kTakes = kAnyAlignment;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    return for_tokens<T>(params.rotation, params.aligned, [](auto table, auto pairs) {
      return launch_rotary<T, typename decltype(table)::type, pairs()>;
    });
  }
};

}  // namespace flash::sm80
