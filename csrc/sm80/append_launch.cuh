// Launches the kernel that appends to a cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/rotary.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm80/append_kernel.cuh"

namespace flash::sm80 {

template <typename T, typename Table, int kPairs>
void launch_append(const AppendParams& params, cudaStream_t stream) {
  const bool rotates = params.rotated_q.data != nullptr;
  const int tokens = std::max(params.seqlen_new, rotates ? params.seqlen_q : 0);
  const dim3 block = token_block(std::max(params.headdim, params.headdim_v), params.rotation.pairs,
                                 rotates ? params.nheads : params.nheads_kv, kPairs);
  const dim3 grid((tokens + block.z - 1) / block.z, std::min(params.batch, kMaxGrid),
                  rotates ? 3 : 2);
  append_kernel<T, Table, kPairs><<<grid, block, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the append kernel");
}

template <typename T, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
struct AppendRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = AppendParams;
  static constexpr uint32_t kTakes = kAnyAlignment | kPages | kCacheSlots;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    return for_tokens<T>(params.rotation, params.aligned, [](auto table, auto pairs) {
      return launch_append<T, typename decltype(table)::type, pairs()>;
    });
  }
};

}  // namespace flash::sm80
