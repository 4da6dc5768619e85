// Writes new keys and values to a cache, keys rotated, in e4m3 if it is; rotates queries; counts
// the keys.
#pragma once

#include <type_traits>

#include "common/e4m3.h"
#include "common/sequence.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "tokens/move_token.cuh"

namespace flash::tokens {

// What a thread block of the grid's third dimension moves.
enum class Moved : unsigned { kKeys, kValues, kQueries };

// Elements from the first of the cache to row `row` of a sequence; -1: the cache has no such row.
__device__ inline int64_t cache_offset(const AppendParams& params, const Operand& cache, int batch,
                                       int row) {
  int slot = batch;
  if (params.block_table != nullptr) {
    slot = params.block_table[batch * params.block_table_stride + row / params.page_size];
    row %= params.page_size;
  } else if (params.cache_batch_idx != nullptr) {
    slot = params.cache_batch_idx[batch];
  }
  if (slot < 0 || slot >= params.slots_k) return -1;
  return slot * cache.batch_stride + row * cache.row_stride;
}

// Grid: (tokens of a sequence, sequences, Moved).
// T, KV: the types of what is new and of the cache.
// kOverlaps: launched so that it starts while the kernel before is ending, and lets the next one.
template <typename T, typename KV, typename Table, int kPairs, bool kInterleaved, bool kOverlaps>
__global__ void __launch_bounds__(kTokenThreads, 4)
    append_kernel(const __grid_constant__ AppendParams params) {
  if constexpr (kOverlaps) {
    ptx::wait_for_earlier_kernels();
    if (gridDim.y <= kFewSequences) ptx::let_next_kernel_start();
  }
  const Moved moved{blockIdx.z};
  const int row = blockIdx.x * blockDim.z + threadIdx.z;
  const auto move = [&](const Operand& source, int batch, auto* target, int64_t target_stride,
                        int nheads, int headdim, const TokenAngles<Table>& angles,
                        auto descale_of_head) {
    move_token<kPairs, kInterleaved>(rows_of<const T>(source, batch, row, 0), source.head_stride,
                                     target, target_stride, nheads, headdim, angles,
                                     params.rotation.pairs, descale_of_head);
  };
  for (int batch = blockIdx.y; batch < params.batch; batch += gridDim.y) {
    const int used = params.seqused_k[batch];
    if (moved == Moved::kQueries) {
      if (row >= params.seqlen_q) continue;
      const TokenAngles<Table> angles(params.rotation, params.masked ? row : 0, max(used, 0));
      move(params.q, batch, rows_of<T>(params.rotated_q, batch, row, 0),
           params.rotated_q.head_stride, params.nheads, params.headdim, angles,
           [](int) { return 1.f; });
      continue;
    }
    const bool keys = moved == Moved::kKeys;
    if (keys && row == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
      params.lengths[batch] = rows_after_append(used, params.seqlen_new);
    }
    if (row >= params.seqlen_new || used < 0 || used >= params.seqlen_k - row) continue;
    const Operand& cache = keys ? params.k : params.v;
    const int64_t offset = cache_offset(params, cache, batch, used + row);
    if (offset < 0) continue;
    TokenAngles<Table> angles(params.rotation, row, used);
    if (!keys) angles.cos = nullptr;
    move(keys ? params.k_new : params.v_new, batch, static_cast<KV*>(cache.data) + offset,
         cache.head_stride, params.nheads_kv, keys ? params.headdim : params.headdim_v, angles,
         [&](int head) {
           if constexpr (std::is_same_v<T, KV>) return 1.f;
           return descale_of(keys ? params.k_descale : params.v_descale, batch, head);
         });
  }
}

}  // namespace flash::tokens
