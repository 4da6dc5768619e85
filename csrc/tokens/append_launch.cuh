// Launches the kernel that appends to a cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "tokens/append_kernel.cuh"
#include "tokens/move_token.cuh"

namespace flash::tokens {

template <typename T, typename KV, typename Table, int kPairs, bool kInterleaved, bool kOverlaps>
void launch_append(const AppendParams& params, cudaStream_t stream) {
  const bool rotates = params.rotated_q.data != nullptr;
  const int tokens = std::max(params.seqlen_new, rotates ? params.seqlen_q : 0);
  const int pairs = params.rotation.pairs, headdim = std::max(params.headdim, params.headdim_v);
  const dim3 block =
      token_block(pairs, headdim - 2 * pairs, rotates ? params.nheads : params.nheads_kv, kPairs);
  const dim3 grid((tokens + block.z - 1) / block.z, std::min(params.batch, kMaxGrid),
                  rotates ? 3 : 2);
  launch_tokens<kOverlaps>(append_kernel<T, KV, Table, kPairs, kInterleaved, kOverlaps>, grid,
                           block, stream, "launch of the append kernel", params);
}

template <typename T, typename KV, typename Out, bool kOverlaps>
struct AppendRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = AppendParams;
  static constexpr uint32_t kTakes = kAnyAlignment | kPages | kCacheSlots;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    return for_tokens<T>(params.rotation, params.aligned,
                         [](auto table, auto pairs, auto interleaved) {
                           return launch_append<T, KV, typename decltype(table)::type, pairs(),
                                                interleaved(), kOverlaps>;
                         });
  }
};

}  // namespace flash::tokens
