// Copies keys and values of a cache in e4m3 to 16 bits, times their descales.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/divisor.h"
#include "common/e4m3.h"
#include "common/pack.h"
#include "common/paged_rows.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "tokens/move_token.cuh"

namespace flash::tokens {

constexpr int kWidenThreads = 256;  // of a thread block, at most
constexpr int kWidenedRows = 8;     // of a thread, for each of its chunks
constexpr int kChunk = 8;           // elements, of one head: 16 bytes in 16 bits
constexpr int kKeysOfABlock = 256;  // or fewer, of all forwards

// Chunks of the keys or values of one token.
struct WidenedToken {
  int chunks;
  Divisor chunks_of_head;
};

// What is beyond the numbers of float16 becomes the largest of them; NaN stays NaN.
template <typename T>
__device__ uint32_t pack_in_range(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const auto clamp = [](float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; };
    return pack(clamp(low), clamp(high), T());
  }
  return pack(low, high, T());
}

// Of the four bytes of a word two words.
template <typename T>
__device__ uint2 widen_word(uint32_t bytes, float factor) {
  const float2 even = unpack<__half>(widen_even<__half>(bytes));
  const float2 odd = unpack<__half>(widen_odd<__half>(bytes));
  return {pack_in_range<T>(even.x * factor, odd.x * factor),
          pack_in_range<T>(even.y * factor, odd.y * factor)};
}

// Grid: (rows / (kWidenedRows * threads in y), sequences, keys or values). Block: (chunks, rows).
// T: the type of 16 bits.
// kOverlaps: launched so that it starts while the kernel before is ending.
template <typename T, bool kOverlaps>
__global__ void __launch_bounds__(kWidenThreads)
    widen_kernel(const __grid_constant__ WidenParams params, const WidenedToken key,
                 const WidenedToken value, const Divisor page_size) {
  if constexpr (kOverlaps) ptx::wait_for_earlier_kernels();
  const bool keys = blockIdx.z == 0;
  const WidenedToken token = keys ? key : value;
  const Operand &cache = keys ? params.k : params.v, &out = keys ? params.k_out : params.v_out;
  const Descale& descale = keys ? params.k_descale : params.v_descale;
  const int first_row = blockIdx.x * kWidenedRows * blockDim.y + threadIdx.y;
  for (int batch = blockIdx.y; batch < params.batch; batch += gridDim.y) {
    const int length = params.seqused_k == nullptr ? params.seqlen_k : params.seqused_k[batch];
    const int end = min(max(length, 0), params.seqlen_k);
    // Blocks of keys that a query sees some of are multiplied as a whole.
    const int begin = max(end - params.reach - kKeysOfABlock, 0);
    int slot = batch;
    if (params.cache_batch_idx != nullptr) {
      slot = min(max(params.cache_batch_idx[batch], 0), params.slots_k - 1);
    }
    const auto source_of = [&](int row) {
      if (params.block_table != nullptr) {
        return PagedRows(params, page_size, batch).offset(cache, row);
      }
      return slot * cache.batch_stride + row * cache.row_stride;
    };
    for (int place = threadIdx.x; place < token.chunks; place += blockDim.x) {
      const int head = token.chunks_of_head.quotient(place);
      const int column = (place - head * token.chunks_of_head.value) * kChunk;
      const uint8_t* const source =
          static_cast<const uint8_t*>(cache.data) + head * cache.head_stride + column;
      T* const target =
          static_cast<T*>(out.data) + batch * out.batch_stride + head * out.head_stride + column;
      uint2 chunks[kWidenedRows];
#pragma unroll
      for (int i = 0; i < kWidenedRows; ++i) {
        const int row = first_row + i * blockDim.y;
        if (row < begin || row >= end) continue;
        chunks[i] = *reinterpret_cast<const uint2*>(source + source_of(row));
      }
      const float factor = kE4m3Unit * descale_of(descale, batch, head);
#pragma unroll
      for (int i = 0; i < kWidenedRows; ++i) {
        const int row = first_row + i * blockDim.y;
        if (row < begin || row >= end) continue;
        const uint2 low = widen_word<T>(chunks[i].x, factor);
        const uint2 high = widen_word<T>(chunks[i].y, factor);
        *reinterpret_cast<uint4*>(target + row * out.row_stride) = {low.x, low.y, high.x, high.y};
      }
    }
  }
}

}  // namespace flash::tokens
