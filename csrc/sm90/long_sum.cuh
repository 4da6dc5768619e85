// Sums over more products of 8 bits than tensor cores add well.
//
// They add them with about 14 bits: what a block of keys adds to the output of a long row is partly
// lost, always to the same side. So no more than kSummedKeys keys are added there, and those sums
// in float32.
#pragma once

#include "sm90/forward_config.cuh"

namespace flash::sm90 {

constexpr int kSummedKeys = 1024;

// One warp's sum, in shared memory.
template <typename Config>
class LongSum {
 public:
  using Out = float[1][Config::kHeadDimV / 8][4];

  // place: accumulators of m16n8, (headdim_v / 8, 32)
  __device__ LongSum(float4* place, int lane) : place_(place + lane) {}

  // One more block of keys is in `out`, which may become zero.
  __device__ void count(Out& out) {
    if (++blocks_ % kBlocks != 0) return;
    if (blocks_ > kBlocks) add(out);
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      float(&x)[4] = out[0][n];
      place_[n * 32] = make_float4(x[0], x[1], x[2], x[3]);
      x[0] = x[1] = x[2] = x[3] = 0.f;
    }
    factors_[0] = factors_[1] = 1.f;
  }

  // What has come so far is to be multiplied by the factors.
  __device__ void rescale(const float (&factors)[2]) {
    factors_[0] *= factors[0];
    factors_[1] *= factors[1];
  }

  // Adds the sum to the output of the last blocks.
  __device__ void finish(Out& out) const {
    if (blocks_ >= kBlocks) add(out);
  }

 private:
  static constexpr int kBlocks = kSummedKeys / Config::kBlockN;
  float4* place_;
  int blocks_ = 0;
  float factors_[2] = {1.f, 1.f};  // of the sum

  __device__ void add(Out& out) const {
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float4 sum = place_[n * 32];
      float(&x)[4] = out[0][n];
      x[0] = fmaf(sum.x, factors_[0], x[0]);
      x[1] = fmaf(sum.y, factors_[0], x[1]);
      x[2] = fmaf(sum.z, factors_[1], x[2]);
      x[3] = fmaf(sum.w, factors_[1], x[3]);
    }
  }
};

}  // namespace flash::sm90
