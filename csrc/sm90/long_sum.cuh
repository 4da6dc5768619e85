// Sums over more products of 8 bits than tensor cores add well.
//
// They add them with about 14 bits: what a block of keys adds to the output of a long row would
// partly be lost, always to the same side. So after kSummedKeys keys a warp adds its output to a sum
// in float32, and starts again at zero. The sums are a workspace, which stays in the L2 cache.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/opaque.h"
#include "sm90/forward_parts.cuh"

namespace flash::sm90 {

constexpr int kSummedKeys = 1024;

// Of a thread block: its size in the workspace.
template <typename Config>
constexpr int kLongSumFloats = Config::kConsumerWarps * Config::kStreams * 16 * Config::kHeadDimV;

// Behind the parts of tiles: how many floats those take.
template <typename Config>
__host__ __device__ inline int64_t long_sums_begin(const ForwardSchedule& schedule) {
  if (schedule.splits == 1) return 0;
  return int64_t{schedule.tiles} * schedule.splits * Config::kConsumerWarps * 16 *
         Config::kHeadDimV;
}

// One warp's sum. It knows nothing of its place but when it goes there: registers are few.
template <typename Config>
class LongSum {
 public:
  using Out = float[1][Config::kHeadDimV / 8][4];

  __device__ LongSum(const QuantisedParams& params, const ForwardSchedule& schedule)
      : params_(params), schedule_(schedule) {}

  // One more block of keys is in `out`.
  __device__ void count(Out& out, int lane) {
    if (++blocks_ % kBlocks != 0 || params_.seqlen_k <= kSummedKeys) return;
    float4* const target = place() + lane;
    if (blocks_ > kBlocks) add(out, target);
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      float(&x)[4] = out[0][n];
      __stcg(target + n * 32, make_float4(x[0], x[1], x[2], x[3]));
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
  __device__ void finish(Out& out, int lane) {
    if (blocks_ >= kBlocks && params_.seqlen_k > kSummedKeys) add(out, place() + lane);
  }

 private:
  static constexpr int kBlocks = kSummedKeys / Config::kBlockN;
  const QuantisedParams& params_;
  const ForwardSchedule& schedule_;
  int blocks_ = 0;
  float factors_[2] = {1.f, 1.f};  // of the sum

  // Accumulators of m16n8, (headdim_v / 8, 32).
  __device__ float4* place() const {
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x)) / 32;
    return reinterpret_cast<float4*>(params_.partial_out + long_sums_begin<Config>(schedule_) +
                                     int64_t{blockIdx.x} * kLongSumFloats<Config> +
                                     warp * 16 * Config::kHeadDimV);
  }

  __device__ void add(Out& out, const float4* sum) const {
#pragma unroll
    for (int n = 0; n < Config::kHeadDimV / 8; ++n) {
      const float4 y = __ldcg(sum + n * 32);
      float(&x)[4] = out[0][n];
      x[0] = fmaf(y.x, factors_[0], x[0]);
      x[1] = fmaf(y.y, factors_[0], x[1]);
      x[2] = fmaf(y.z, factors_[1], x[2]);
      x[3] = fmaf(y.w, factors_[1], x[3]);
    }
  }
};

}  // namespace flash::sm90
