// Launches the rotary embedding.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "tokens/move_token.cuh"
#include "tokens/rotary_kernel.cuh"

namespace flash::tokens {

template <typename T, typename Table, int kPairs, bool kInterleaved, bool kOverlaps>
void launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  const int pairs = params.rotation.pairs;
  const int copied = params.in_place ? 0 : params.headdim - 2 * pairs;
  const dim3 block = token_block(pairs, copied, params.nheads, kPairs);
  const bool packed = params.cu_seqlens != nullptr;
  const dim3 grid((params.seqlen + block.z - 1) / block.z,
                  packed ? 1 : std::min(params.batch, kMaxGrid));
  launch_tokens<kOverlaps>(rotary_kernel<T, Table, kPairs, kInterleaved, kOverlaps>, grid, block,
                           stream, "launch of the rotary kernel", params);
}

template <typename T, typename KV, typename Out, bool kOverlaps>
struct RotaryRow {
  static_assert(std::is_same_v<T, KV> && std::is_same_v<T, Out>);
  using Params = RotaryParams;
  static constexpr uint32_t kTakes = kAnyAlignment;
  static constexpr int kTiles = 1;

  static auto prepare(Params& params, Workspaces&) {
    return for_tokens<T>(params.rotation, params.aligned,
                         [](auto table, auto pairs, auto interleaved) {
                           return launch_rotary<T, typename decltype(table)::type, pairs(),
                                                interleaved(), kOverlaps>;
                         });
  }
};

}  // namespace flash::tokens
