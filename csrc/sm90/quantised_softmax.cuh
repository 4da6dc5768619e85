// The softmax where operands have 8 bits: scores have scales, probabilities become e4m3.
//
//   s = (q . k) * scale[row] * k_scale[block] * softmax_scale
//   p = 2^(s * log2(e) - reference)
//   o = sum of p * v * v_scale[block]
//
// (Of values in 16 bits, so are probabilities, and v_scale is 1.) o is kept in units of the v_scale
// of the last block. Most blocks have the same, so a block with another is treated as one whose
// rows have outgrown their references. As in softmax.cuh nobody searches for maxima before the
// exponentials, but a sum of a whole block would leave e4m3 too little of its range. So the largest
// probability, or sum of four, tells whether the reference is outgrown.
#pragma once

#include <cstdint>

#include "common/e4m3.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/opaque.h"
#include "ptx/special_functions.h"
#include "sm90/dense_tiles.h"
#include "sm90/forward_config.cuh"
#include "sm90/probabilities.cuh"
#include "sm90/softmax.cuh"

namespace flash::sm90 {

// Where a multiplier is zero, as of a row of zeros, -inf would become NaN. NaN stays.
constexpr float kLeastMultiplier = 0x1p-100f;
__device__ inline float not_zero(float x) {
  return fabsf(x) < kLeastMultiplier ? kLeastMultiplier : x;
}

// Integer scores, below 2^22, become floats by one addition: the number, plus kOffset.
template <typename Score>
constexpr float kOffset = 0.f;
template <>
constexpr float kOffset<int> = 12582912.f;  // 1.5 * 2^23

// Calls function(scores as floats, plus kOffset).
template <int kColTiles, typename Function>
__device__ void as_floats(float (&scores)[1][kColTiles][4], Function function) {
  function(scores);
}
template <int kColTiles, typename Function>
__device__ void as_floats(const int (&scores)[1][kColTiles][4], Function function) {
  float floats[1][kColTiles][4];
  for_each(floats, [&](float& x, int m, int n, int j) {
    x = __int_as_float(scores[m][n][j] + 0x4b400000);
  });
  function(floats);
}

// The first of a sequence's blocks in what is kept for blocks of keys.
__device__ inline int first_scaled_block(const AttentionParams& params, const Sequence& sequence,
                                         int batch) {
  return params.cu_seqlens_k == nullptr ? 0 : sequence.k_first / kScaledKeys + batch;
}

// Of the block that begins with key n of the sequence.
template <bool kScaledValues>
__device__ inline BlockScales block_scales(const QuantisedParams& params, const Sequence& sequence,
                                           const Tile& tile, int n) {
  // (Registers are few in a producer: nothing shall be computed before its loop.)
  const int batch = ptx::opaque(tile.batch), head = ptx::opaque(tile.head_kv);
  const int block = first_scaled_block(params, sequence, batch) + n / kScaledKeys;
  const auto of = [&](const Scales& scales) {
    return scales.data[batch * scales.batch_stride + head * scales.head_stride + block];
  };
  return {of(params.k_scale), kScaledValues ? of(params.v_scale) : 1.f};
}

// Of a lane's two rows, and of the block of keys whose scores are computed.
template <bool kFull>
struct TileScales {
  float q[2];                         // with the softmax scale
  BlockScales block{1.f, 1.f}, last;  // last: of the block before

  __device__ TileScales(const QuantisedParams& params, const Tile& tile) {
    q[0] = q[1] = params.score_scale * (kFull ? 1.f : kLog2e) *
                  descale_of(params.q_descale, tile.batch, tile.head_kv) *
                  descale_of(params.k_descale, tile.batch, tile.head_kv);
  }

  // Whether scores are to change their sign. What they are multiplied by then is positive.
  __device__ bool take_sign() {
    const bool negative = q[0] < 0.f;
    for (float& scale : q) scale = fabsf(scale);
    return negative;
  }

  // The rows have scales of their own.
  __device__ void join(const float (&of_rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) q[half] *= of_rows[half];
  }

  __device__ void advance(const BlockScales& next) {
    last = block;
    block = next;
  }

  // Scores of the full set get their scale; others have it in their Exponents.
  template <typename Score, int kColTiles>
  __device__ void apply(float (&scores)[1][kColTiles][4], Score) const {
    if constexpr (kFull) {
      const float units[2] = {q[0] * block.k, q[1] * block.k};
      for_each(scores, [&](float& x, int, int, int j) {
        x = fmaf(x, units[j / 2], -kOffset<Score> * units[j / 2]);
      });
    }
  }
};

template <typename Score, bool kFull>
__device__ Exponents exponents_of(const TileScales<kFull>& scales, float scale_log2, Score) {
  Exponents exponents;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = kFull ? scale_log2 : not_zero(scales.q[r] * scales.block.k);
    exponents.factor[r] = factor;
    exponents.offset[r] = kFull ? 0.f : -kOffset<Score> * factor;
  }
  return exponents;
}

// As softmax_step of softmax.cuh.
// scores: as floats
// relative: what the exponents are by the references so far
// again: whether what came before is to be multiplied by something anyway
// kFirst: nothing came before
// finish_output(): called when p, which a product may have read so far, is wanted, or the output
// rescale(factors): what came before is to be multiplied by the factors
template <typename Probabilities, bool kFirst, int kSteps, int kColTiles, typename FinishOutput,
          typename Rescale>
__device__ void quantised_softmax_step(uint32_t (&p)[kSteps][4], SoftmaxState<1>& softmax,
                                       const float (&scores)[1][kColTiles][4],
                                       const Exponents& exponents, Exponents relative, bool again,
                                       FinishOutput finish_output, Rescale rescale) {
  float factors[2];
  const auto raise = [&] {
    raise_references(softmax, {true, true}, scores, factors,
                     [&](float score, int r) { return exponents.of(score, r); });
    relative = Probabilities::relative(exponents, softmax);
  };
  if (kFirst) raise();
  Probabilities found(scores, relative, finish_output);
  // If one row of the warp has outgrown its reference, those of the others follow their maxima too:
  // they would be next. (Where there is NaN the row is NaN, whatever its reference.)
  if (!kFirst && __any_sync(0xffffffff, found.outgrown() || again)) {
    raise();
    rescale(factors);
    found = Probabilities(scores, relative, [] {});
  }
  found.store(p);
  if constexpr (Probabilities::kSummed) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.sum[r] = fmaf(found.sums[r], 1.f / (1 << Probabilities::kBits), softmax.sum[r]);
    }
  }
}

// finish_rows (common/softmax.h). Sinks join here: beside p' they could be the largest by far.
// sinks: of all heads, or null; head_of(r): that of row r
// counts_sink: of the lanes that share a row, in one
template <typename HeadOf>
__device__ void finish_quantised_rows(SoftmaxState<1>& softmax, const float* sinks, HeadOf head_of,
                                      float scale, float (&factors)[2], float (&lse)[2],
                                      bool counts_sink) {
  float before[2] = {1.f, 1.f};
  if (sinks != nullptr) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sink = sinks[head_of(r)] * kLog2e;
      before[r] = softmax.raise_reference(sink > softmax.reference[r], r, sink);
      if (counts_sink) softmax.sum[r] += ptx::ex2(sink - softmax.reference[r]);
    }
  }
  finish_rows(softmax, scale, factors, lse, WarpTeam());
#pragma unroll
  for (int r = 0; r < 2; ++r) factors[r] *= before[r];
}

}  // namespace flash::sm90
