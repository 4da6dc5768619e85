// Values of 8 bits as WGMMA takes them, keys side by side, on their way from 16 bits.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/opaque.h"
#include "sm90/scaled_blocks.cuh"

namespace flash::sm90 {

// The transpose of 128 rows of values in shared memory, four keys in a word. A thread writes words
// of eight columns: those of different threads of a warp are in different banks.
template <int kDim, int kThreads>
struct TransposedValues {
  static constexpr int kOctets = kDim / 8, kWords = kScaledKeys / 4;
  static constexpr int kSpread = kOctets > 16 ? 1 : kOctets > 8 ? 2 : 4;
  uint32_t words[kDim][kWords];

  __device__ uint32_t& word(int col, int i) { return words[col][i ^ (col / 8 * kSpread)]; }

  // What a thread has: up to kItems times four keys, whose places are a word, by eight columns.
  static constexpr int kItems = (kWords * kOctets + kThreads - 1) / kThreads;
  // Calls function(item, word, first column). (In a loop, places that are not computed anew would
  // occupy registers.)
  template <typename Function>
  __device__ static void for_each_item(Function function) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int i = ptx::opaque(static_cast<int>(threadIdx.x)) + item * kThreads;
      if (i < kWords * kOctets) function(item, i / kOctets, i % kOctets * 8);
    }
  }
  // The row of key `key` (0..3) of a word: the inverse of place_of_key.
  __device__ static int row_of(int word, int key) {
    return word / 4 * 16 + word % 4 * 2 + key % 2 + key / 2 * 8;
  }

  // Calls function(item, key, source) for eight columns of each key; a null source: there is none.
  template <typename T, typename Function>
  __device__ static void for_each_source(const Operand& from, const QuantisedRows& rows, int cols,
                                         Function function) {
    const T* const source = static_cast<const T*>(from.data) + rows.batch * from.batch_stride +
                            int64_t{1} * rows.first * from.row_stride +
                            rows.head * from.head_stride;
    for_each_item([&](int item, int word, int col) {
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        const int row = row_of(word, key);
        const bool exists = row < rows.count && col < cols;
        function(item, key, exists ? source + row * from.row_stride + col : nullptr);
      }
    });
  }

  // Writes all to device memory. By the thread block.
  __device__ void store(const Operand& to, const QuantisedRows& rows, int cols) {
    __syncthreads();
    auto* const target = static_cast<uint8_t*>(to.data) + rows.batch * to.batch_stride +
                         rows.head * to.head_stride + int64_t{1} * rows.block * kScaledKeys;
    const int lane = threadIdx.x % 32;
    for (int col = threadIdx.x / 32; col < cols; col += kThreads / 32) {
      reinterpret_cast<uint32_t*>(target + col * to.row_stride)[lane] = word(col, lane);
    }
    __syncthreads();
  }
};

}  // namespace flash::sm90
