// Merges attention to more keys into attention to some, in place.
#pragma once

#include <cmath>

#include "common/sequence.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "tokens/move_token.cuh"

namespace flash::tokens {

// A thread block merges the heads of kMergedTokens tokens, some heads at a time: first each thread
// finds the weights of one (token, head), then all of them add up the outputs.
constexpr int kMergedTokens = 8;  // log-sum-exps of neighbours share a line of memory
constexpr int kMergedHeads = kTokenThreads / kMergedTokens;

// What the two outputs of a row are multiplied by.
struct MergeWeights {
  float out, part;
};

// Returns the log-sum-exp of all keys. Without a visible key both weights are 0.
__device__ inline float merge_lse(float lse, float part_lse, MergeWeights& weights) {
  const float largest = fmaxf(lse, part_lse);
  if (largest == -INFINITY && lse == part_lse) {  // (and not NaN, which fmaxf drops)
    weights = {0.f, 0.f};
    return -INFINITY;
  }
  const float whole = largest + logf(expf(lse - largest) + expf(part_lse - largest));
  weights = {expf(lse - whole), expf(part_lse - whole)};
  return whole;
}

// Grid: (tokens / kMergedTokens, sequences).
// T: of the part. Out: of what it is merged into. kChannels: that a thread merges at a time
template <typename T, typename Out, int kChannels, bool kOverlaps>
__global__ void __launch_bounds__(kTokenThreads)
    merge_kernel(const __grid_constant__ MergeParams params) {
  __shared__ MergeWeights weights[kMergedHeads][kMergedTokens];
  if constexpr (kOverlaps) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
  }
  const int first_token = blockIdx.x * kMergedTokens;
  const int tokens = min(kMergedTokens, params.seqlen - first_token);
  const int chunks = params.headdim / kChannels;  // of a head
  for (int batch = blockIdx.y; batch < params.batch; batch += gridDim.y) {
    for (int first_head = 0; first_head < params.nheads; first_head += kMergedHeads) {
      const int heads = min(kMergedHeads, params.nheads - first_head);
      {
        const int token = threadIdx.x % kMergedTokens, head = threadIdx.x / kMergedTokens;
        if (token < tokens && head < heads) {
          float& lse = params.lse.at(batch, first_head + head, first_token + token);
          const float part_lse = params.part_lse.at(batch, first_head + head, first_token + token);
          lse = merge_lse(lse, part_lse, weights[head][token]);
        }
      }
      __syncthreads();
      const int head_chunks = heads * chunks;
#pragma unroll 2
      for (int i = threadIdx.x; i < tokens * head_chunks; i += kTokenThreads) {
        const int token = i / head_chunks, head = i % head_chunks / chunks;
        const int channel = i % head_chunks % chunks * kChannels;
        using Outs = Channels<Out, kChannels>;
        using Parts = Channels<T, kChannels>;
        auto& out = *reinterpret_cast<Outs*>(
            rows_of<Out>(params.out, batch, first_token + token, first_head + head) + channel);
        const Parts part = *reinterpret_cast<const Parts*>(
            rows_of<const T>(params.part, batch, first_token + token, first_head + head) + channel);
        const MergeWeights weight = weights[head][token];
        Outs merged = out;
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          merged.x[j] = static_cast<Out>(weight.out * static_cast<float>(merged.x[j]) +
                                         weight.part * static_cast<float>(part.x[j]));
        }
        out = merged;
      }
      __syncthreads();  // the weights are not in use any more
    }
  }
}

}  // namespace flash::tokens
