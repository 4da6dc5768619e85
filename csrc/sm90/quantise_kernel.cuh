// The pass before attention of operands in 8 bits: k is rotated and rounded, v is rounded and
// transposed, all in one launch. Queries, which one thread block of the attention reads, are
// rounded there (query_rounding.cuh); they come here for a rotary embedding alone.
//
// A tile is 128 rows of one head. Thread blocks stay, and copy their next tile to shared memory
// while they round this one. A thread copies what it reads itself: no barrier. A row's or the
// block's largest magnitude is known before anything is rounded, and memory is read once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/pack.h"
#include "common/shared_address.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/cvt.h"
#include "ptx/griddepcontrol.h"
#include "ptx/max_nan.h"
#include "ptx/opaque.h"
#include "sm90/rotation.cuh"
#include "sm90/rounding.cuh"
#include "sm90/scaled_blocks.cuh"
#include "sm90/transposed_values.cuh"
#include "tokens/move_token.cuh"

namespace flash::sm90 {

// T: of q, k and v. Quantised: of k afterwards. kDim: of its heads afterwards, and the most of
// those of v. kRotary: whether q and k get a rotary embedding first.
template <typename T_, typename Quantised_, int kHeadDim, bool kRotary_>
struct QuantiseConfig {
  using T = T_;
  using Quantised = Quantised_;
  static constexpr int kDim = kHeadDim;
  static constexpr bool kRotary = kRotary_;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;  // a warp has 16 rows of q or k
  static_assert(kScaledKeys == 16 * kWarps);
  using Transposed = TransposedValues<kDim, kThreads>;
  static constexpr int kSlots = std::max(kDim / 16, 4 * Transposed::kItems);  // of 16 bytes
  static constexpr int kStages = 2;
  // Of a row's angles a lane has every fourth eight, of two rows, cosines and sines.
  static constexpr int kUnits = kRotary ? (kDim / 2 + 31) / 32 : 0,
                       kAngleSlots = 4 * kUnits + !kRotary;

  struct Shared {
    uint4 slots[kStages][kSlots][kThreads];
    union {
      Transposed transposed;                // of v
      uint4 angles[kAngleSlots][kThreads];  // of k and q
    };
    float maxima[2][kWarps];  // of a tile and, while some still read those, of the next
  };
  static constexpr int kBlocks = kDim == 64 ? (kRotary ? 3 : 4) : kDim <= 128 ? 2 : 1;  // an SM
};

// Over the thread block.
template <int kWarps>
__device__ float largest_of_block(float x, float (&shared)[kWarps]) {
  x = largest_of_lanes(x, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return largest_of_lanes(shared[threadIdx.x % kWarps], kWarps);
}

// The least power of 2^12, but at least 2^-48, with which e4m3 reaches `largest`. Not finite: NaN.
// There are few such scales, so most blocks have the same. Of what is smaller by 2^12 than the
// largest number of e4m3 it still has three bits.
__device__ inline float power_of_two_step(float largest) {
  if (!(largest < INFINITY)) return NAN;
  if (largest == 0.f) return 1.f;
  constexpr int kMantissa = 0x7fffff, kBias = 127, kBits = 12, kLeast = -48;
  static_assert(kLeast % kBits == 0);
  const int bits = __float_as_int(__fdiv_rn(largest, 448.f));
  const int exponent = max(((bits + kMantissa) >> 23) - kBias, kLeast);  // rounded up
  const int steps = (exponent - kLeast + kBits - 1) / kBits;
  return __int_as_float((kBias + kLeast + steps * kBits) << 23);
}

__device__ inline float& scale_of(const Scales& scales, const QuantisedRows& rows, int place) {
  return scales.data[rows.batch * scales.batch_stride + rows.head * scales.head_stride + place];
}

enum class Role { kValues, kKeys, kQueries };

// The tiles, those of v first, then of k, then, with a rotary embedding, of q.
template <bool kRotary>
struct QuantiseTiles {
  const QuantiseParams& params;

  // Of the thread block's tiles, the one behind `index`; -1: the first. params.tiles or more: no
  // tile is left. With a rotary embedding those of k and q follow each other: heads of the same
  // rows have the same angles.
  __device__ int behind(int index) const {
    const int following = index < 0 ? blockIdx.x : index + gridDim.x;
    if (!kRotary || (index < params.tiles_v && following < params.tiles_v)) return following;
    const auto begin = [&](unsigned block) {
      const int64_t rest = params.tiles - params.tiles_v;
      return params.tiles_v + static_cast<int>(rest * block / gridDim.x);
    };
    const int next = index < params.tiles_v ? begin(blockIdx.x) : index + 1;
    return next < begin(blockIdx.x + 1) ? next : params.tiles;
  }

  __device__ Role role(int index) const {
    return index < params.tiles_v                    ? Role::kValues
           : index < params.tiles_v + params.tiles_k ? Role::kKeys
                                                     : Role::kQueries;
  }
  __device__ QuantisedRows rows(int index) const {
    if (index >= params.tiles_v) index -= params.tiles_v;
    if (index < params.tiles_k) return keys_of_tile(params, index);
    index -= params.tiles_k;
    const int blocks = (params.seqlen_q + kScaledKeys - 1) / kScaledKeys;
    const int first = index / params.nheads % blocks * kScaledKeys;
    return {index / params.nheads / blocks, index % params.nheads, first,
            min(params.seqlen_q - first, kScaledKeys), 0};
  }
};

template <typename Config>
class Quantiser {
  using T = typename Config::T;
  using Quantised = typename Config::Quantised;
  using Transposed = typename Config::Transposed;
  static constexpr int kDim = Config::kDim, kParts = kDim / 32;
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  using Pair = std::conditional_t<kIsHalf, __half2, __nv_bfloat162>;

  const QuantiseParams& params_;
  typename Config::Shared& shared_;
  const int lane_ = threadIdx.x % 32, first_row_ = threadIdx.x / 32 * 16 + lane_ / 4;
  bool parity_ = false;
  int angles_of_ = -1;  // the first row whose angles are there

 public:
  __device__ Quantiser(const QuantiseParams& params, typename Config::Shared& shared)
      : params_(params), shared_(shared) {}

  // Copies what this thread reads of a tile.
  __device__ void load(Role role, const QuantisedRows& rows, int stage) {
    const auto copy = [&](int slot, const T* source) {
      ptx::cp_async_16_zfill(shared_address(&shared_.slots[stage][slot][threadIdx.x]),
                             source == nullptr ? params_.k.data : source, source != nullptr);
    };
    if (role == Role::kValues) {
      Transposed::template for_each_source<T>(
          params_.v, rows, params_.headdim_v,
          [&](int item, int key, const T* source) { copy(4 * item + key, source); });
      return;
    }
    const Operand& from = role == Role::kKeys ? params_.k : params_.q;
    const int col = lane_ % 4 * 8;
    const T* const source = static_cast<const T*>(from.data) + rows.batch * from.batch_stride +
                            int64_t{1} * rows.first * from.row_stride +
                            rows.head * from.head_stride + col;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + 8 * half;
        const bool exists = row < rows.count && 32 * i + col < params_.headdim;
        copy(2 * i + half, exists ? source + row * from.row_stride + 32 * i : nullptr);
      }
    }
  }

  __device__ void round(Role role, const QuantisedRows& rows, int stage) {
    if (role == Role::kValues) {
      round_values(rows, stage);
      return;
    }
    if constexpr (Config::kRotary) {
      load_angles(rows.first);
      embed(stage);
    }
    if (!Config::kRotary || role == Role::kKeys) {
      round_keys(rows, stage);
    } else {
      store_queries(rows, stage);
    }
  }

 private:
  __device__ float (&maxima()) [Config::kWarps] {
    parity_ = !parity_;
    return shared_.maxima[parity_];
  } __device__ uint4 read(int stage, int slot) const {
    return shared_.slots[stage][slot][threadIdx.x];
  }

  // The angles that this thread needs. A unit is those of eight pairs.
  __device__ void load_angles(int first_row) {
    if (first_row == angles_of_) return;
    angles_of_ = first_row;
    const Rotation& rotation = params_.rotation;
#pragma unroll
    for (int i = 0; i < 2 * Config::kUnits; ++i) {
      const int unit = i / 2 * 4 + lane_ % 4;
      if (unit >= rotation.pairs / 8) break;
      const tokens::TokenAngles<T> angles(rotation, first_row + first_row_ + i % 2 * 8, 0);
      ptx::cp_async_16_zfill(shared_address(&shared_.angles[2 * i][threadIdx.x]),
                             angles.cos + 8 * unit, true);
      ptx::cp_async_16_zfill(shared_address(&shared_.angles[2 * i + 1][threadIdx.x]),
                             angles.sin + 8 * unit, true);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  // The rotary embedding of the warp's rows, in shared memory. The lanes of a row share its units.
  __device__ void embed(int stage) {
    using Eight = tokens::Channels<T, 8>;
    const bool interleaved = params_.rotation.interleaved;
    const int units = params_.rotation.pairs / 8, t = lane_ % 4;
    __syncwarp();  // the other lanes have copied
#pragma unroll
    for (int i = 0; i < Config::kUnits; ++i) {
      const int unit = 4 * i + t;
      if (unit >= units) break;
      const int first = interleaved ? 2 * unit : unit;
      const int second = interleaved ? first + 1 : unit + units;
      const auto octet = [&](int number, int half) -> Eight& {
        return reinterpret_cast<Eight&>(
            shared_.slots[stage][number / 4 * 2 + half][threadIdx.x - t + number % 4]);
      };
      const auto angles = [&](int half, bool of_sin) {
        return reinterpret_cast<const T*>(&shared_.angles[4 * i + 2 * half + of_sin][threadIdx.x]);
      };
      // Rows of both halves at once: nobody waits for the first to be written.
      Eight a[2], b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[half] = octet(first, half), b[half] = octet(second, half);
        float cos[8], sin[8];
        tokens::read_angles(cos, angles(half, false), 1.f);
        tokens::read_angles(sin, angles(half, true), 1.f);
        tokens::rotate(a[half], b[half], cos, sin, interleaved);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        octet(first, half) = a[half], octet(second, half) = b[half];
      }
    }
    __syncwarp();
  }

  // The keys' 128 rows have one scale.
  __device__ void round_keys(const QuantisedRows& rows, int stage) {
    using Rotation = RandomRotation<T, kDim>;
    typename Rotation::Rows x;
    Rotation::apply(x, ptx::opaque(lane_),
                    [&](int i, int half) { return read(stage, 2 * i + half); });
    const float norm = rsqrtf(static_cast<float>(kDim));
    const float of_lane = ptx::max_nan(largest_of_row(x, 0), largest_of_row(x, 1));
    const float scale = step_of<Quantised>(largest_of_block(of_lane, maxima()) * norm);
    if (threadIdx.x == 0) scale_of(params_.k_scale, rows, rows.block) = scale;
    const float factor = __fdividef(norm, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* const target = target_of<uint8_t>(params_.k_out, rows, half);
      if (target == nullptr) continue;
      round_row<Quantised>(x, half, factor, [&](int i, uint2 numbers) {
        *reinterpret_cast<uint2*>(target + 32 * i) = numbers;
      });
    }
  }

  // Queries leave as they came, but for the rotary embedding.
  __device__ void store_queries(const QuantisedRows& rows, int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const target = target_of<T>(params_.q_out, rows, half);
      if (target == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (32 * i + lane_ % 4 * 8 < params_.headdim) {
          *reinterpret_cast<uint4*>(target + 32 * i) = read(stage, 2 * i + half);
        }
      }
    }
  }

  // Of a lane's columns in its row; null: there is no such row.
  template <typename To>
  __device__ To* target_of(const Operand& to, const QuantisedRows& rows, int half) const {
    const int row = first_row_ + 8 * half;
    if (row >= rows.count) return nullptr;
    return static_cast<To*>(to.data) + rows.batch * to.batch_stride +
           int64_t{1} * (rows.first + row) * to.row_stride + rows.head * to.head_stride +
           lane_ % 4 * 8;
  }

  __device__ void round_values(const QuantisedRows& rows, int stage) {
    Pair most = {};
    Transposed::for_each_item([&](int item, int, int) {
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        const uint4 numbers = read(stage, 4 * item + key);
        for (uint32_t pair : {numbers.x, numbers.y, numbers.z, numbers.w}) {
          most = __hmax2_nan(most, __habs2(reinterpret_cast<const Pair&>(pair)));
        }
      }
    });
    const float2 both = unpack<T>(reinterpret_cast<const uint32_t&>(most));
    const float largest = largest_of_block(ptx::max_nan(both.x, both.y), maxima());
    const float scale = power_of_two_step(largest);
    if (threadIdx.x == 0) scale_of(params_.v_scale, rows, rows.block) = scale;
    write_values(rows, stage, __fdiv_rn(1.f, scale));
  }

  // Rounds the values and writes them transposed.
  __device__ void write_values(const QuantisedRows& rows, int stage, float factor) {
    Transposed::for_each_item([&](int item, int word, int col) {
      alignas(16) uint32_t pairs[4][4];  // of columns, for each key
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        reinterpret_cast<uint4&>(pairs[key]) = read(stage, 4 * item + key);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 x[4];
#pragma unroll
        for (int key = 0; key < 4; ++key) {
          x[key] = unpack<T>(pairs[key][i]);
          x[key].x *= factor, x[key].y *= factor;
        }
        auto& transposed = shared_.transposed;
        transposed.word(col + 2 * i, word) = ptx::pack_e4m3(x[0].x, x[1].x, x[2].x, x[3].x);
        transposed.word(col + 2 * i + 1, word) = ptx::pack_e4m3(x[0].y, x[1].y, x[2].y, x[3].y);
      }
    });
    shared_.transposed.store(params_.v_out, rows, params_.headdim_v);
  }
};

// Grid: thread blocks that share the tiles.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    quantise_kernel(const __grid_constant__ QuantiseParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();

  const QuantiseTiles<Config::kRotary> tiles{params};
  Quantiser<Config> quantiser(params, *reinterpret_cast<typename Config::Shared*>(memory));
  int index = tiles.behind(-1);
  QuantisedRows next = tiles.rows(index);
  if (index < params.tiles) quantiser.load(tiles.role(index), next, 0);
  ptx::cp_async_commit();
  for (int stage = 0, following; index < params.tiles; index = following, stage ^= 1) {
    const QuantisedRows rows = next;
    following = tiles.behind(index);
    if (following < params.tiles) {
      next = tiles.rows(following);
      quantiser.load(tiles.role(following), next, stage ^ 1);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    quantiser.round(tiles.role(index), rows, stage);
  }
}

}  // namespace flash::sm90
