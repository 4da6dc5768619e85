// The pass before attention of operands in 8 bits: q and k are rotated and rounded, v is rounded
// and transposed, all in one launch.
//
// A thread block takes 128 rows of one head, four lanes a row, and keeps them in registers: a row's
// or the block's largest magnitude is known before anything is rounded, and memory is read once.
// Values go through shared memory, a byte each, to come out transposed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/pack.h"
#include "params.h"
#include "ptx/cvt.h"
#include "ptx/griddepcontrol.h"
#include "ptx/max_nan.h"
#include "sm90/rotation.cuh"
#include "sm90/scaled_blocks.cuh"

namespace flash::sm90 {

constexpr int kQuantiseThreads = 4 * kScaledKeys;

// NaN if there is any, as of all that follow.
__device__ inline float largest_of_lanes(float x, int lanes) {
  for (int i = 1; i < lanes; i *= 2) x = ptx::max_nan(x, __shfl_xor_sync(0xffffffff, x, i));
  return x;
}

// Over the thread block.
__device__ inline float largest_of_block(float x, float (&shared)[kQuantiseThreads / 32]) {
  x = largest_of_lanes(x, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return largest_of_lanes(shared[threadIdx.x % (kQuantiseThreads / 32)], kQuantiseThreads / 32);
}

// What the largest number of T stands for `largest` with.
template <typename T>
__device__ float step_of(float largest) {
  constexpr float kMost = std::is_same_v<T, int8_t> ? 127.f : 448.f;
  return largest == 0.f ? 1.f : __fdiv_rn(largest, kMost);
}

// The least power of two, but at least 2^-64, with which e4m3 reaches `largest`. Not finite: NaN.
__device__ inline float power_of_two_step(float largest) {
  if (!(largest < INFINITY)) return NAN;
  constexpr int kMantissa = 0x7fffff, kLeastExponent = 127 - 64;
  const int bits = __float_as_int(__fdiv_rn(largest, 448.f));
  return __int_as_float(max((bits + kMantissa) >> 23, kLeastExponent) << 23);
}

// Four numbers, rounded to nearest, ties to even. Of int8 they are within +-127.
__device__ inline uint32_t pack_four(const float* x, __nv_fp8_e4m3) {
  return ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
}
__device__ inline uint32_t pack_four(const float* x, int8_t) {
  uint32_t bits[4];  // a whole number in the lowest byte
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(x[i] + 12582912.f);
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040),
                     0x5410);
}

// Eight numbers of 16 bits.
template <typename T>
__device__ void read_eight(float (&x)[8], const T* from) {
  const uint4 read = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

// A row's columns 32 i + 8 t + e, zero where there are none.
template <typename T, int kParts>
__device__ void read_row(float (&x)[kParts][8], const Operand& from, const QuantisedRows& rows,
                         int cols) {
  const int row = threadIdx.x / 4, t = threadIdx.x % 4;
  const T* const source = static_cast<const T*>(from.data) + rows.batch * from.batch_stride +
                          int64_t{1} * (rows.first + row) * from.row_stride +
                          rows.head * from.head_stride;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int col = 32 * i + 8 * t;
    if (row < rows.count && col < cols) {
      read_eight(x[i], source + col);
    } else {
#pragma unroll
      for (float& element : x[i]) element = 0.f;
    }
  }
}

template <int kParts>
__device__ float largest_in(const float (&x)[kParts][8]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
#pragma unroll
    for (float element : x[i]) largest = ptx::max_nan(largest, fabsf(element));
  }
  return largest;
}

__device__ inline float& scale_of(const Scales& scales, const QuantisedRows& rows, int place) {
  return scales.data[rows.batch * scales.batch_stride + rows.head * scales.head_stride + place];
}

// kOneScale: of all 128 rows; else each has its own.
template <typename T, typename Quantised, int kDim, bool kOneScale>
__device__ void rotate_and_round(const Operand& from, const Operand& to, const Scales& scales,
                                 const QuantisedRows& rows, int cols,
                                 float (&shared)[kQuantiseThreads / 32]) {
  constexpr int kParts = kDim / 32;
  const int row = threadIdx.x / 4, t = threadIdx.x % 4;
  float x[kParts][8];
  read_row<T>(x, from, rows, cols);
  Rotation4<kDim>::apply(x, t);
  float largest = largest_in(x);
  largest = kOneScale ? largest_of_block(largest, shared) : largest_of_lanes(largest, 4);
  const float norm = rsqrtf(static_cast<float>(kDim));
  const float scale = step_of<Quantised>(largest * norm);
  const bool writes = kOneScale ? threadIdx.x == 0 : t == 0 && row < rows.count;
  if (writes) scale_of(scales, rows, kOneScale ? rows.block : rows.first + row) = scale;
  if (row >= rows.count) return;
  auto* const target = static_cast<uint8_t*>(to.data) + rows.batch * to.batch_stride +
                       int64_t{1} * (rows.first + row) * to.row_stride + rows.head * to.head_stride;
  const float factor = __fdividef(norm, scale);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
#pragma unroll
    for (float& element : x[i]) element *= factor;
    *reinterpret_cast<uint2*>(target + 32 * i + 8 * t) =
        make_uint2(pack_four(x[i], Quantised()), pack_four(x[i] + 4, Quantised()));
  }
}

// The transpose of 128 rows of values, four keys in a word. A thread writes words of eight columns:
// those of different threads of a warp are in different banks.
template <int kDim>
struct TransposedValues {
  static constexpr int kOctets = kDim / 8, kWords = kScaledKeys / 4;
  static constexpr int kSpread = kOctets > 16 ? 1 : kOctets > 8 ? 2 : 4;
  uint32_t words[kDim][kWords];

  __device__ uint32_t& word(int col, int i) { return words[col][i ^ (col / 8 * kSpread)]; }

  // What a thread has: up to kItems times four keys, whose places are a word, by eight columns.
  static constexpr int kItems = (kWords * kOctets + kQuantiseThreads - 1) / kQuantiseThreads;
  // Calls function(item, word, first column).
  template <typename Function>
  __device__ static void for_each_item(Function function) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int i = threadIdx.x + item * kQuantiseThreads;
      if (i < kWords * kOctets) function(item, i / kOctets, i % kOctets * 8);
    }
  }
  // The row of key `key` (0..3) of a word: the inverse of place_of_key.
  __device__ static int row_of(int word, int key) {
    return word / 4 * 16 + word % 4 * 2 + key % 2 + key / 2 * 8;
  }

  // Writes all to device memory. By the thread block.
  __device__ void store(const Operand& to, const QuantisedRows& rows, int cols) {
    __syncthreads();
    auto* const target = static_cast<uint8_t*>(to.data) + rows.batch * to.batch_stride +
                         rows.head * to.head_stride + int64_t{1} * rows.block * kScaledKeys;
    const int lane = threadIdx.x % 32;
    for (int col = threadIdx.x / 32; col < cols; col += kQuantiseThreads / 32) {
      reinterpret_cast<uint32_t*>(target + col * to.row_stride)[lane] = word(col, lane);
    }
    __syncthreads();
  }
};

// Values of 16 bits.
template <int kDim>
using ValueItems = float[TransposedValues<kDim>::kItems][4][8];

template <int kItems, typename Function>
__device__ void for_each_value(float (&x)[kItems][4][8], Function function) {
#pragma unroll
  for (auto& item : x) {
#pragma unroll
    for (auto& key : item) {
#pragma unroll
      for (float& element : key) function(element);
    }
  }
}

// Eight columns of the four keys of each word; zeros where there are none.
// read(item, key, source): source is null if there are none
template <typename T, int kDim, typename Read>
__device__ void read_values(const Operand& from, const QuantisedRows& rows, int cols, Read read) {
  const T* const source = static_cast<const T*>(from.data) + rows.batch * from.batch_stride +
                          int64_t{1} * rows.first * from.row_stride + rows.head * from.head_stride;
  TransposedValues<kDim>::for_each_item([&](int item, int word, int col) {
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      const int row = TransposedValues<kDim>::row_of(word, key);
      const bool exists = row < rows.count && col < cols;
      read(item, key, exists ? source + row * from.row_stride + col : nullptr);
    }
  });
}

// Rounds x, which becomes what is lost, and writes it transposed. By the thread block.
template <int kDim>
__device__ void write_term(ValueItems<kDim>& x, const Operand& to, const QuantisedRows& rows,
                           int cols, TransposedValues<kDim>& shared) {
  shared.for_each_item([&](int item, int word, int col) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float (&keys)[4][8] = x[item];
      const uint32_t rounded = ptx::pack_e4m3(keys[0][c], keys[1][c], keys[2][c], keys[3][c]);
      shared.word(col + c, word) = rounded;
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        __nv_fp8_e4m3 number;
        number.__x = rounded >> key * 8 & 0xff;
        keys[key][c] -= static_cast<float>(number);
      }
    }
  });
  shared.store(to, rows, cols);
}

// Values of 8 bits, transposed.
template <int kDim>
__device__ void transpose_values(const QuantiseParams& params, const QuantisedRows& rows,
                                 TransposedValues<kDim>& shared) {
  uint2 x[TransposedValues<kDim>::kItems][4];
  read_values<uint8_t, kDim>(params.v, rows, params.headdim_v,
                             [&](int item, int key, const uint8_t* source) {
                               x[item][key] = make_uint2(0, 0);
                               if (source != nullptr) {
                                 x[item][key] = *reinterpret_cast<const uint2*>(source);
                               }
                             });
  shared.for_each_item([&](int item, int word, int col) {
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

// Values of 16 bits: rounded and transposed, once or twice.
template <typename T, int kDim>
__device__ void quantise_values(const QuantiseParams& params, const QuantisedRows& rows,
                                TransposedValues<kDim>& shared,
                                float (&maxima)[kQuantiseThreads / 32]) {
  ValueItems<kDim> x = {};
  read_values<T, kDim>(params.v, rows, params.headdim_v, [&](int item, int key, const T* source) {
    if (source != nullptr) read_eight(x[item][key], source);
  });
  float largest = 0.f;
  for_each_value(x, [&](float& element) { largest = ptx::max_nan(largest, fabsf(element)); });
  const float scale = power_of_two_step(largest_of_block(largest, maxima));
  if (threadIdx.x == 0) scale_of(params.v_scale, rows, rows.block) = scale;
  const float factor = __fdiv_rn(1.f, scale);
  for_each_value(x, [&](float& element) { element *= factor; });
  write_term(x, params.v_out, rows, params.headdim_v, shared);
  if (params.v_low.data != nullptr) {
    write_term(x, params.v_low, rows, params.headdim_v, shared);
  }
}

// Thread blocks of an SM, as many as registers allow.
template <typename T, int kDim>
constexpr int kQuantiseBlocks = sizeof(T) == 1              ? 4
                                : kDim == 64 || kDim == 128 ? 2
                                                            : 1;

// T: of q, k and v. Quantised: of q and k afterwards. kDim: of their heads afterwards, and the most
// of those of v.
// Grid: blocks of 128 rows of v, then of k, then of q; what takes longest comes first.
template <typename T, typename Quantised, int kDim>
__global__ void __launch_bounds__(kQuantiseThreads, kQuantiseBlocks<T, kDim>)
    quantise_kernel(const __grid_constant__ QuantiseParams params) {
  __shared__ TransposedValues<kDim> transposed;
  __shared__ float largest[kQuantiseThreads / 32];
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();

  const int keys_batch = params.cu_seqlens_k == nullptr ? params.batch : 1;
  const int64_t of_keys = int64_t{1} * params.blocks * params.nheads_kv * keys_batch;
  const int64_t index = blockIdx.x;
  // Heads of the same rows are neighbours: memory has them side by side.
  const auto rows_of_keys = [&](int64_t i) {
    const int head = static_cast<int>(i % params.nheads_kv);
    const int block = static_cast<int>(i / params.nheads_kv % params.blocks);
    return keys_of_block(params, static_cast<int>(i / params.nheads_kv / params.blocks), head,
                         block);
  };
  if (index < of_keys) {
    const QuantisedRows rows = rows_of_keys(index);
    if constexpr (sizeof(T) == 1) {
      transpose_values(params, rows, transposed);
    } else {
      quantise_values<T>(params, rows, transposed, largest);
    }
  } else if constexpr (sizeof(T) == 2) {
    if (index < 2 * of_keys) {
      rotate_and_round<T, Quantised, kDim, true>(params.k, params.k_out, params.k_scale,
                                                 rows_of_keys(index - of_keys), params.headdim,
                                                 largest);
    } else {
      const int64_t rest = index - 2 * of_keys;
      const int blocks = (params.seqlen_q + kScaledKeys - 1) / kScaledKeys;
      const int head = static_cast<int>(rest % params.nheads);
      const int first = static_cast<int>(rest / params.nheads % blocks) * kScaledKeys;
      const int batch = static_cast<int>(rest / params.nheads / blocks);
      const QuantisedRows rows{batch, head, first, min(params.seqlen_q - first, kScaledKeys), 0};
      rotate_and_round<T, Quantised, kDim, false>(params.q, params.q_out, params.q_scale, rows,
                                                  params.headdim, largest);
    }
  }
}

}  // namespace flash::sm90
