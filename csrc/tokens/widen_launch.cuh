// Launches the kernel that widens a cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "tokens/move_token.cuh"
#include "tokens/widen_kernel.cuh"

namespace flash::tokens {

template <typename T, typename KV, typename Out, bool kOverlaps>
struct WidenRow {
  static_assert(std::is_same_v<T, Out>);
  using Params = WidenParams;
  static constexpr uint32_t kTakes = kPages | kCacheSlots;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    const auto token = [&](int headdim) {
      const int chunks = headdim / kChunk;
      return WidenedToken{chunks * params.nheads_kv, Divisor(chunks)};
    };
    const WidenedToken key = token(params.headdim), value = token(params.headdim_v);
    const Divisor page_size(std::max(params.page_size, 1));
    const int columns = std::min(std::max(key.chunks, value.chunks), kWidenThreads);
    const dim3 block(columns, kWidenThreads / columns);
    const int rows = kWidenedRows * static_cast<int>(block.y);
    const dim3 grid((params.seqlen_k - 1) / rows + 1, std::min(params.batch, kMaxGrid), 2);
    return [=](const Params& bound, cudaStream_t stream) {
      launch_tokens<kOverlaps>(widen_kernel<T, kOverlaps>, grid, block, stream,
                               "launch of the widen kernel", bound, key, value, page_size);
    };
  }
};

}  // namespace flash::tokens
