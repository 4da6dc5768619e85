// The rotary embedding: copies tokens, channel pairs of their heads turned by the angle of their
// position.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/pack.h"
#include "host/launch.h"
#include "params.h"

namespace flash::tokens {

constexpr int kTokenThreads = 128;  // of a thread block
constexpr int kTokenHeads = 2;      // of a thread at a time
constexpr int kMostZ = 64;          // threads of a block in z, CUDA's limit

// Channels that a thread moves at a time, 16 bytes by each instruction at most.
template <typename T, int kChannels>
struct alignas(sizeof(T) * kChannels < 16 ? sizeof(T) * kChannels : 16) Channels {
  T x[kChannels];
};

// Cosines or sines, times `sign`.
template <typename Table, int kPairs>
__device__ void read_angles(float (&values)[kPairs], const Table* source, float sign) {
  const auto row = *reinterpret_cast<const Channels<Table, kPairs>*>(source);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) values[i] = sign * static_cast<float>(row.x[i]);
}

// Of one token: the rows of the tables for its position, `row` behind that of its sequence's first,
// or the nearest that there are. cos null: not rotated.
template <typename Table>
struct TokenAngles {
  const Table *cos, *sin;  // (pairs)
  float sign;              // of sin

  // row: not negative
  __device__ TokenAngles(const Rotation& rotation, int row, int offset)
      : cos(nullptr), sin(nullptr), sign(rotation.conjugate ? -1.f : 1.f) {
    if (rotation.cos == nullptr) return;
    const int64_t position =
        max(min(int64_t{row} + offset, int64_t{rotation.positions} - 1), int64_t{0});
    cos = static_cast<const Table*>(rotation.cos) + position * rotation.pairs;
    sin = static_cast<const Table*>(rotation.sin) + position * rotation.pairs;
  }

  // Of pairs `first` and following; of several, the second half is of `second` and following.
  template <int kPairs>
  __device__ void read(float (&cos_of)[kPairs], float (&sin_of)[kPairs], int first,
                       int second) const {
    constexpr int kParts = kPairs == 1 ? 1 : 2, kEach = kPairs / kParts;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int pair = i == 0 ? first : second;
      read_angles(reinterpret_cast<float (&)[kEach]>(cos_of[i * kEach]), cos + pair, 1.f);
      read_angles(reinterpret_cast<float (&)[kEach]>(sin_of[i * kEach]), sin + pair, sign);
    }
  }
};

// Products and sums are rounded one by one, as PyTorch's are: both give the same bits.
__device__ inline float2 turn(float a, float b, float cos, float sin) {
  return make_float2(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)),
                     __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos)));
}

// Turns the pair of the only channels, or those of both. Of 16 bits, two are converted at a time.
template <typename T, int kPairs>
__device__ void rotate(Channels<T, kPairs>& first, Channels<T, kPairs>& second,
                       const float (&cos)[kPairs], const float (&sin)[kPairs], bool interleaved) {
  if constexpr (kPairs == 1) {
    const float2 x = turn(first.x[0], second.x[0], cos[0], sin[0]);
    first.x[0] = static_cast<T>(x.x), second.x[0] = static_cast<T>(x.y);
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const auto turn_pair = [&](float& a, float& b) {
        const float2 x = turn(a, b, cos[i], sin[i]);
        a = x.x, b = x.y;
      };
      if (interleaved) {
        auto& of_pair = i < kPairs / 2 ? first.x : second.x;
        turn_pair(of_pair[2 * i % kPairs], of_pair[2 * i % kPairs + 1]);
      } else {
        turn_pair(first.x[i], second.x[i]);
      }
    }
  } else {
    auto* const low = reinterpret_cast<uint32_t*>(first.x);
    auto* const high = reinterpret_cast<uint32_t*>(second.x);
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      const float2 a = unpack<T>(low[i]), b = unpack<T>(high[i]);
      if (interleaved) {
        const float2 x = turn(a.x, a.y, cos[i], sin[i]);
        const float2 y = turn(b.x, b.y, cos[kPairs / 2 + i], sin[kPairs / 2 + i]);
        low[i] = pack(x.x, x.y, T()), high[i] = pack(y.x, y.y, T());
      } else {
        const float2 x = turn(a.x, b.x, cos[2 * i], sin[2 * i]);
        const float2 y = turn(a.y, b.y, cos[2 * i + 1], sin[2 * i + 1]);
        low[i] = pack(x.x, y.x, T()), high[i] = pack(x.y, y.y, T());
      }
    }
  }
}

// The threads of a block: x is one's channels, y its heads, z its token.
// copied: channels of a head that move without being rotated; channels: of a thread at a time
inline dim3 token_block(int pairs, int copied, int nheads, int channels) {
  const int x = std::clamp((pairs + copied) / channels, 1, kTokenThreads);
  const int y = std::min((nheads + kTokenHeads - 1) / kTokenHeads, kTokenThreads / x);
  return dim3(x, y, std::min(kTokenThreads / (x * y), kMostZ));
}

// Writes channels as they are.
template <typename T, int kChannels>
__device__ void put(T* target, const Channels<T, kChannels>& source, float) {
  *reinterpret_cast<Channels<T, kChannels>*>(target) = source;
}

// Divides them and rounds to nearest, at most +-448; NaN stays NaN.
template <typename T, int kChannels>
__device__ void put(__nv_fp8_e4m3* target, const Channels<T, kChannels>& source, float descale) {
  Channels<__nv_fp8_e4m3, kChannels> rounded;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    rounded.x[i] = __nv_fp8_e4m3(__fdiv_rn(static_cast<float>(source.x[i]), descale));
  }
  *reinterpret_cast<Channels<__nv_fp8_e4m3, kChannels>*>(target) = rounded;
}

// Moves the heads of one token, by the threads of its z: see token_block. A thread reads its angles
// once for kTokenHeads heads.
// source, target: (nheads, headdim), head_strides apart; may be the same
// descale_of(head): what the numbers in the target, if they are e4m3, are to be multiplied by
template <int kPairs, bool kInterleaved, typename T, typename Target, typename Table,
          typename DescaleOf>
__device__ void move_token(const T* source, int64_t source_stride, Target* target,
                           int64_t target_stride, int nheads, int headdim,
                           const TokenAngles<Table>& angles, int pairs, DescaleOf descale_of) {
  const bool in_place = static_cast<const void*>(source) == target;
  const int rotated_units = angles.cos == nullptr ? 0 : pairs / kPairs;
  const int first_copied = rotated_units * 2 * kPairs;
  const int units = rotated_units + (in_place ? 0 : (headdim - first_copied) / kPairs);
  // A thread has kPairs channels at two places, half of the rotated channels apart, also of
  // interleaved pairs. Only a single interleaved pair is at one place.
  constexpr bool kBeside = kPairs == 1 && kInterleaved;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const bool rotated = unit < rotated_units;
    const int first = !rotated  ? first_copied + (unit - rotated_units) * kPairs
                      : kBeside ? unit * 2
                                : unit * kPairs;
    const int second = first + (kBeside ? 1 : pairs);
    const int first_pair = kInterleaved && !kBeside ? unit * kPairs / 2 : unit * kPairs;
    const int second_pair = first_pair + (kInterleaved ? pairs / 2 : kPairs / 2);
    for (int begin = threadIdx.y; begin < nheads; begin += kTokenHeads * blockDim.y) {
      using Some = Channels<T, kPairs>;
      Some a[kTokenHeads], b[kTokenHeads];
#pragma unroll
      for (int i = 0; i < kTokenHeads; ++i) {
        const int head = begin + i * blockDim.y;
        if (head >= nheads) continue;
        const T* const from = source + head * source_stride;
        a[i] = *reinterpret_cast<const Some*>(from + first);
        if (rotated) b[i] = *reinterpret_cast<const Some*>(from + second);
      }
      // Behind the loads of the token, which take longer; with few heads a thread comes here once.
      float cos[kPairs], sin[kPairs];
      if (rotated) angles.read(cos, sin, first_pair, second_pair);
#pragma unroll
      for (int i = 0; i < kTokenHeads; ++i) {
        const int head = begin + i * blockDim.y;
        if (head >= nheads) continue;
        Target* const to = target + head * target_stride;
        const float descale = descale_of(head);
        if (rotated) {
          rotate(a[i], b[i], cos, sin, kInterleaved);
          put(to + second, b[i], descale);
        }
        put(to + first, a[i], descale);
      }
    }
  }
}

template <bool kOverlaps, typename Kernel, typename... Arguments>
void launch_tokens(Kernel kernel, dim3 grid, dim3 block, cudaStream_t stream, const char* call,
                   const Arguments&... arguments) {
  if constexpr (kOverlaps) {
    launch_overlapping(kernel, grid, block, 0, stream, call, arguments...);
  } else {
    kernel<<<grid, block, 0, stream>>>(arguments...);
    check_cuda(cudaGetLastError(), call);
  }
}

template <typename Type>
struct TypeOf {
  using type = Type;
};

// Host code: choose(TypeOf<type of the tables>, pairs that a thread moves at a time, whether they
// are interleaved).
template <typename T, typename Choose>
auto for_tokens(const Rotation& rotation, bool aligned, Choose choose) {
  const auto choose_order = [&](auto table, auto pairs) {
    return rotation.interleaved ? choose(table, pairs, std::true_type())
                                : choose(table, pairs, std::false_type());
  };
  using Many = std::integral_constant<int, 16 / sizeof(T)>;
  using One = std::integral_constant<int, 1>;
  const bool many = aligned && rotation.pairs % Many() == 0;
  if (rotation.float_tables) {
    return many ? choose_order(TypeOf<float>(), Many()) : choose_order(TypeOf<float>(), One());
  }
  return many ? choose_order(TypeOf<T>(), Many()) : choose_order(TypeOf<T>(), One());
}

}  // namespace flash::tokens
