// Values of 8 bits as WGMMA takes them, keys side by side; and the pass that transposes values of
// e4m3.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "params.h"
#include "ptx/griddepcontrol.h"
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

constexpr int kTransposeThreads = 512;

// Grid: blocks of 128 rows of v.
template <int kDim>
__global__ void __launch_bounds__(kTransposeThreads, 4)
    transpose_kernel(const __grid_constant__ QuantiseParams params) {
  using Transposed = TransposedValues<kDim, kTransposeThreads>;
  __shared__ Transposed shared;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const QuantisedRows rows = keys_of_tile(params, blockIdx.x);
  uint2 x[Transposed::kItems][4];
  Transposed::template for_each_source<uint8_t>(
      params.v, rows, params.headdim_v, [&](int item, int key, const uint8_t* source) {
        x[item][key] = make_uint2(0, 0);
        if (source != nullptr) x[item][key] = *reinterpret_cast<const uint2*>(source);
      });
  Transposed::for_each_item([&](int item, int word, int col) {
    const uint2(&keys)[4] = x[item];
    const auto write = [&](int first, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
      const uint32_t low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
      const uint32_t high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
      shared.word(first, word) = __byte_perm(low_ab, low_cd, 0x5410);
      shared.word(first + 1, word) = __byte_perm(low_ab, low_cd, 0x7632);
      shared.word(first + 2, word) = __byte_perm(high_ab, high_cd, 0x5410);
      shared.word(first + 3, word) = __byte_perm(high_ab, high_cd, 0x7632);
    };
    write(col, keys[0].x, keys[1].x, keys[2].x, keys[3].x);
    write(col + 4, keys[0].y, keys[1].y, keys[2].y, keys[3].y);
  });
  shared.store(params.v_out, rows, params.headdim_v);
}

}  // namespace flash::sm90
