// Sums over more products of 8 bits than tensor cores add well.
//
// They add them with about 14 bits: what a block of keys adds to the output of a long row is partly
// lost, always to the same side. So they add kSummedKeys keys, and those sums are added in float32.
#pragma once

#include "ptx/opaque.h"
#include "sm90/forward_config.cuh"

namespace flash::sm90 {

constexpr int kSummedKeys = 1024;

// One warp's sum, in shared memory: accumulators of m16n8.
template <typename Config>
class LongSum {
 public:
  using Out = float[1][Config::kHeadDimV / 8][4];
  using Sums = decltype(Config::SharedStorage::sums);

  // sums: of all warps
  __device__ explicit LongSum(Sums& sums) : sums_(sums) {}

  // What `out` holds is in the sum, which goes on with the next blocks alone.
  __device__ bool is_fresh() const { return blocks_ % kMost == 0; }

  // One more block of keys is in `out`.
  __device__ void count(Out& out) {
    if (++blocks_ % kMost != 0) return;
    if (blocks_ > kMost) add(out);
    float4* const sum = place();
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float (&x)[4] = out[0][n];
      sum[n * 32] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // What has come so far is to be multiplied by the factors.
  __device__ void rescale(const float (&factors)[2]) {
    if (blocks_ < kMost) return;
    float4* const sum = place();
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float4 x = sum[n * 32];
      sum[n * 32] =
          make_float4(x.x * factors[0], x.y * factors[0], x.z * factors[1], x.w * factors[1]);
    }
  }

  // Adds the sum to the output of the last block or blocks.
  __device__ void finish(Out& out) const {
    if (blocks_ >= kMost) add(out);
  }

 private:
  static constexpr int kMost = kSummedKeys / Config::kBlockN;
  Sums& sums_;
  int blocks_ = 0;

  // The lane's. Found again instead of occupying a register.
  __device__ float4* place() const {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    return sums_[thread / 32 % Config::kConsumerWarps] + thread % 32;
  }

  __device__ void add(Out& out) const {
    const float4* const sum = place();
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float4 y = sum[n * 32];
      float (&x)[4] = out[0][n];
      x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
    }
  }
};

}  // namespace flash::sm90
