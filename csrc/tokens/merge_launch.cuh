// Launches the merge of two attentions.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "tokens/merge_kernel.cuh"

namespace flash::tokens {

template <typename T, typename Out, int kChannels, bool kOverlaps>
void launch_merge(const MergeParams& params, cudaStream_t stream) {
  constexpr auto kKernel = merge_kernel<T, Out, kChannels, kOverlaps>;
  const dim3 grid((params.seqlen + kMergedTokens - 1) / kMergedTokens,
                  std::min(params.batch, kMaxGrid));
  constexpr char kCall[] = "launch of the merge kernel";
  if constexpr (kOverlaps) {
    launch_overlapping(kKernel, grid, kTokenThreads, 0, stream, kCall, params);
  } else {
    kKernel<<<grid, kTokenThreads, 0, stream>>>(params);
    check_cuda(cudaGetLastError(), kCall);
  }
}

template <typename T, typename KV, typename Out, bool kOverlaps>
struct MergeRow {
  static_assert(std::is_same_v<T, KV>);
  using Params = MergeParams;
  static constexpr uint32_t kTakes = kAnyAlignment;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    return params.aligned && params.headdim % 8 == 0 ? launch_merge<T, Out, 8, kOverlaps>
                                                     : launch_merge<T, Out, 1, kOverlaps>;
  }
};

}  // namespace flash::tokens
