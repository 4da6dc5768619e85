// Sums over more products of 8 bits than tensor cores add well.
//
// They add them with about 14 bits: what a block of keys adds to the output of a long row is partly
// lost, always to the same side. So they add kSummedKeys keys, and those sums are added in float32.
#pragma once

#include <cstdint>

#include "common/fragment.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/forward_config.cuh"
#include "sm90/tma_store.cuh"

namespace flash::sm90 {

constexpr int kSummedKeys = 1024;

// One warp's sum, in shared memory: accumulators of m16n8.
template <typename Config>
class LongSum {
 public:
  using Out = float[1][Config::kHeadDimV / 8][4];
  using Stages = typename Config::WarpStages;
  static constexpr int kBlocks = kSummedKeys / Config::kBlockN;  // that `out` may hold

  // stages: of all warps
  __device__ explicit LongSum(Stages& stages) : stages_(stages) {}

  // What `out` holds is in the sum, which goes on with the next blocks alone.
  __device__ bool is_fresh() const { return blocks_ == 0 || blocks_ == kBlocks; }

  // One more block of keys is in `out`, or will be: its product may be under way. If `out` holds as
  // many as it may, the sum takes them. (`out` is not changed: to be changed under a condition, it
  // would be copied to other registers.)
  __device__ void count(Out& out) {
    ++blocks_;
    if (blocks_ != kBlocks && blocks_ != 2 * kBlocks) return;
    ptx::wgmma_wait<0>(out[0]);
    add(out, blocks_ == kBlocks);
  }

  // The sum takes what `out` holds, which begins anew. For those who do not count.
  __device__ void take(Out& out) {
    add(out, blocks_ == 0);
    clear(out);
  }

  // What has come so far is to be multiplied by the factors.
  __device__ void rescale(const float (&factors)[2]) {
    if (blocks_ < kBlocks) return;
    Words* const sum = place();
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      float x[4];
      load(x, sum[n]);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] *= factors[j / 2];
      store(sum[n], x);
    }
  }

  // Adds the sum to the output of the last blocks.
  __device__ void finish(Out& out) const {
    if (blocks_ < kBlocks) return;
    const Words* const sum = place();
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      float x[4];
      load(x, sum[n]);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[0][n][j] += x[j];
    }
  }

 private:
  Stages& stages_;
  int blocks_ = 0;  // that are counted in `out`; kBlocks more: others are in the sum

  // first: the sum holds nothing yet
  __device__ void add(const Out& out, bool first) {
    blocks_ = kBlocks;
    Words* const sum = place();
    if (first) {
      wait_for_stores_of_warp();
#pragma unroll
      for (int n = 0; n < Config::kHeadDimV / 8; ++n) store(sum[n], out[0][n]);
      return;
    }
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      float x[4];
      load(x, sum[n]);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] += out[0][n][j];
      store(sum[n], x);
    }
  }

  // Four accumulators of the lane, in words of all lanes.
  using Words = uint32_t[Config::kSumWords][32];

  // The lane's. Found again instead of occupying a register.
  __device__ Words* place() const {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    Words* const warp = stages_[thread / 32 % Config::kConsumerWarps].sums;
    return reinterpret_cast<Words*>(&warp[0][0][thread % 32 * (Config::kSumWords == 4 ? 4 : 1)]);
  }

  // Three words hold the upper halves of two numbers, of two others, and what follows in each.
  __device__ static void store(Words& words, const float (&x)[4]) {
    if constexpr (Config::kSumWords == 4) {
      reinterpret_cast<float4&>(words) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      const auto bytes_of = [&](int i, int j, unsigned bytes) {
        return __byte_perm(__float_as_uint(x[i]), __float_as_uint(x[j]), bytes);
      };
      words[0][0] = bytes_of(0, 1, 0x7632);
      words[1][0] = bytes_of(2, 3, 0x7632);
      words[2][0] = __byte_perm(bytes_of(0, 1, 0x51), bytes_of(2, 3, 0x51), 0x5410);
    }
  }
  __device__ static void load(float (&x)[4], const Words& words) {
    if constexpr (Config::kSumWords == 4) {
      const float4 y = reinterpret_cast<const float4&>(words);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
      // (The lowest byte, which is lost, is taken to be that above it.)
      const uint32_t low = words[2][0];
      x[0] = __uint_as_float(__byte_perm(words[0][0], low, 0x1044));
      x[1] = __uint_as_float(__byte_perm(words[0][0], low, 0x3255));
      x[2] = __uint_as_float(__byte_perm(words[1][0], low, 0x1066));
      x[3] = __uint_as_float(__byte_perm(words[1][0], low, 0x3277));
    }
  }
};

// Of products of 16 bits, or of few keys.
struct NoLongSum {
  static constexpr int kBlocks = 0;

  template <typename Stages>
  __device__ explicit NoLongSum(Stages&) {}
  __device__ bool is_fresh() const { return false; }
  template <typename Out>
  __device__ void count(Out&) const {}
  template <typename Out>
  __device__ void take(Out&) const {}
  template <typename Out>
  __device__ void finish(Out&) const {}
  __device__ void rescale(const float (&)[2]) const {}
};

}  // namespace flash::sm90
