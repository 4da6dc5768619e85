// The consumers of operands in 8 bits.
//
// Beside those of 16 bits they have: queries that they round (query_rounding.cuh), probabilities in
// e4m3 (probabilities.cuh) and the sums of long rows in shared memory (long_sum.cuh).
#pragma once

#include <climits>
#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/scores.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/named_barrier.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/forward_parts.cuh"
#include "sm90/long_sum.cuh"
#include "sm90/quantised_epilogue.cuh"
#include "sm90/quantised_softmax.cuh"
#include "sm90/query_rounding.cuh"

namespace flash::sm90 {

// By all threads, before their first barrier.
template <typename Config>
__device__ void fill_ones(typename Config::SharedStorage& shared) {
  constexpr uint32_t kOnes = 0x38383838;  // in e4m3
  if (threadIdx.x < sizeof(shared.ones) / 4) {
    reinterpret_cast<uint32_t*>(shared.ones)[threadIdx.x] = kOnes;
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// By all threads, before their first barrier: zeros in the rows of Q that its boxes do not fill.
template <typename Config>
__device__ void clear_spare_rows(typename Config::SharedStorage& shared,
                                 const ForwardSchedule& schedule) {
  using T = typename Config::T;
  constexpr int kParts = sm90::kParts<T, Config::kHeadDim>, kChunks = kPartRowBytes / 16;
  const int first = schedule.rows * schedule.group, count = Config::kBlockM - first;
  for (int i = threadIdx.x; i < Config::kQStages * kParts * count * kChunks;
       i += Config::kThreads) {
    const int part = i / (count * kChunks), chunk = i % (count * kChunks);  // of all stages
    reinterpret_cast<uint4*>(shared.q)[(part * Config::kBlockM + first) * kChunks + chunk] =
        make_uint4(0, 0, 0, 0);
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

template <typename Config>
__device__ void consume_quantised(const QuantisedParams& params, const ForwardMaps& maps,
                                  const ForwardSchedule& schedule, float scale_log2,
                                  typename Config::SharedStorage& shared, int warpgroup) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr bool kQInRegisters = Config::kQInRegisters, kScaled = Config::kScaled;
  constexpr int kBlockN = Config::kBlockN, kOutTiles = Config::kHeadDimV / 8;
  using Score = typename Config::Score;
  using Probabilities = typename Config::Probabilities;
  int thread = threadIdx.x % kWarpgroup;
  if constexpr (Config::kKeepsThread) thread = keep(thread);
  const int lane = thread % 32;
  const int warp_row = warpgroup * kWarpgroupRows + thread / 32 * kWarpRows;
  const int first_row = warp_row + lane / 4;  // and + 8
  const auto query_of = [&](int row) { return schedule.query_of(row); };
  const int first_query = query_of(warpgroup * kWarpgroupRows);
  const int last_query = query_of(warpgroup * kWarpgroupRows + kWarpgroupRows - 1);
  const Turns<Config> turns(warpgroup);

  Consumer<Config> consumer{shared, warpgroup, lane};
  auto& kv_state = consumer.kv_state;
  Score scores[1][kBlockN / 8][4];
  uint32_t p[kBlockN / kWgmmaDepth<typename Config::V>][4];
  float block_sums[1][4];  // of P's rows
  typename Consumer<Config>::Queries q;
  for (;;) {
    const typename Config::Sent tile = consumer.look_at_tile();
    if (tile.batch < 0) break;
    const auto& range = range_of<Config>(params, schedule, tile);
    wait_for_earlier_kernels<Config>(schedule);
    std::conditional_t<kScaled, QueryRounding<Config>, typename Config::Nothing> rounding;
    if constexpr (kScaled) {
      rounding.load(params, schedule, tile, range, first_row, lane);
    }
    const Mask mask{range.sequence.seqlen_k, 0, params.window_left, params.window_right};
    // Of the warpgroup's queries, one sees keys up to seen_end, all see all_begin .. all_end - 1.
    const bool has_queries = warp_uniform(range.m_begin + first_query) < range.m_end;
    const int first = range.position + first_query, last = range.position + last_query;
    const int seen_end = has_queries ? mask.end_key(last) : 0;
    const int all_end = mask.end_key(first);
    int all_begin = mask.first_key(last);

    float out[1][kOutTiles][4] = {};
    const float no_sinks[2] = {-INFINITY, -INFINITY};
    SoftmaxState<1> softmax(scale_log2, no_sinks, false);
    using Sum = std::conditional_t<Config::kSums, LongSum<Config>, NoLongSum>;
    Sum long_sum(shared.warp_stages);
    // It takes `out` within a step or, where keys are divided or nothing is computed ahead, between
    // two loops of steps.
    constexpr bool kSomeAhead = Config::kAhead > 0;
    constexpr bool kSumInStep =
        Config::kSums && !Config::kLinear && !Config::kDivided && kSomeAhead;
    constexpr bool kSumBetween = Config::kSums && !kSumInStep;
    const ScoreTransform transform(params, tile.batch, tile.head, mask.shift);
    TileScales<kFull> scales(params, tile);
    // (Scales of blocks are positive. The full set multiplies scores by descales as they are.)
    const bool negative = !kFull && !kScaled && scales.take_sign();
    if (negative) all_begin = INT_MAX;  // no block is left as it is
    // By the scales of the block at hand.
    Exponents exponents, relative;
    const auto find_exponents = [&] {
      exponents = exponents_of(scales, softmax.scale_log2, Score{});
      relative = Probabilities::relative(exponents, softmax);
    };
    // Where there are registers, they are computed while products are.
    const auto find_exponents_early = [&] {
      if (!Config::kManyRegisters) return;
      find_exponents();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::hold(relative.factor[r]);
        ptx::hold(relative.offset[r]);
      }
    };
    // The probabilities of the block that begins with key n.
    const auto softmax_block = [&](auto first, int n, auto finish_output) {
      const int key = n + lane % 4 * 2;
      const int row = ptx::opaque(range.position);  // or what follows would occupy registers
      as_floats(scores, [&](float (&scores)[1][kBlockN / 8][4]) {
        const auto mask_scores = [&] {
          if (n + kBlockN <= all_end && n >= all_begin) return;
          const auto row_of = [&](int, int half) { return row + query_of(first_row + half * 8); };
          if (negative) for_each(scores, [](float& x, int, int, int) { x = -x; });
          apply_mask(scores, mask, row_of, key);
        };
        scales.apply(scores, Score{});
        if constexpr (kFull) {
          transform.apply(scores, row + first_row, key, mask_scores, [](int, int, int, float) {});
        }
        mask_scores();
        if (!Config::kManyRegisters) find_exponents();
        const bool rescaled = Config::kScaledValues && scales.block.v != scales.last.v;
        quantised_softmax_step<Probabilities, decltype(first)::value>(
            p, softmax, scores, exponents, relative, rescaled, finish_output,
            [&](float (&factors)[2]) {
              if constexpr (Config::kScaledValues) {
                const float quotient = __fdividef(scales.last.v, scales.block.v);
                for (float& factor : factors) factor *= quotient;
              }
              rescale_output(out, factors);
              long_sum.rescale(factors);
            });
      });
    };
    const auto begin_output = [&] {
      if constexpr (!Probabilities::kSummed) {
        consumer.begin_output_and_sums(out, block_sums, p);
      } else if constexpr (Config::kQuantisedValues) {
        consumer.begin_quantised_output(out, p, !kSumInStep || !long_sum.is_fresh());
      } else {
        consumer.begin_output(out, p);
      }
    };
    const auto finish_output = [&] {
      if constexpr (Probabilities::kSummed) {
        ptx::wgmma_wait<0>(out[0]);
      } else {
        ptx::wgmma_wait<0>(out[0], block_sums);
        // A row's sum counts in one of the lanes that share it.
        const float unit = lane % 4 == 0 ? Config::kProbabilityUnit : 0.f;
        softmax.sum[0] = fmaf(block_sums[0][0], unit, softmax.sum[0]);
        softmax.sum[1] = fmaf(block_sums[0][2], unit, softmax.sum[1]);
      }
      consumer.release_v();
      kv_state.advance();
    };

    QuantisedEpilogue<Config> epilogue{params, schedule, warp_row, lane};
    const auto finish_softmax = [&] {
      epilogue.finish_softmax(consumer.tile(), softmax, Config::kProbabilityUnit * scales.block.v);
    };

    auto block = range.blocks;
    bool more = !block.empty();
    // Around a diagonal a warpgroup may see none of the first blocks. Without queries it sees none.
    while (more && block.key() >= seen_end) {
      more = !block.is_last();
      consumer.skip_block(!more);
      turns.take();
      turns.pass();
      block.advance();
    }
    if (more) {
      if constexpr (kScaled) {
        float of_rows[2];
        rounding.round(shared.q[0], of_rows, first_row, lane);
        scales.join(of_rows);
        if constexpr (kQInRegisters) {
          __syncwarp();
        } else {
          ptx::bar_sync(kRounded + warpgroup, kWarpgroup);
        }
      } else {
        consumer.wait_for_q();
      }
      consumer.wait_for_k(kv_state);
      consumer.load_q(q);
      if constexpr (kQInRegisters && !kScaled) consumer.release_q();
      turns.take();
      consumer.begin_scores(scores, q, kv_state);
      turns.pass();
      scales.advance(consumer.scales_of(kv_state));
      ptx::wgmma_wait<0>(scores[0]);
      consumer.release_k(kv_state);
      find_exponents_early();
      softmax_block(std::true_type(), block.key(), [] {});
      // Each step: the scores of the next block of keys and the output of this one, of which the
      // rest is computed beside the softmax, or before it.
      const auto step = [&] {
        block.advance();
        const auto next = kv_state.next();
        consumer.wait_for_k_and_v(next);
        turns.take();
        consumer.begin_scores(scores, q, next);
        begin_output();
        turns.pass();
        scales.advance(consumer.scales_of(next));
        find_exponents_early();
        ptx::wgmma_wait<1>(scores[0]);
        consumer.release_k(next);
        const auto finish_block = [&] {
          // (ptxas moves a wait up to the last condition: what is computed ahead stays before
          // that of the sum, or before one that is never met. All codes are where it wants them,
          // unless the kernel transposes values.)
          constexpr bool kAllAhead = Config::kLinear && Config::kAhead == Config::kAllCodes;
          if constexpr (kSumInStep) {
            long_sum.count(out);
          } else if constexpr (kSomeAhead && (!kAllAhead || Config::kTransposes)) {
            if (schedule.rows < 0) __trap();
          }
          finish_output();
        };
        if constexpr (!kSomeAhead) finish_block();
        softmax_block(std::false_type(), block.key(), [&] {
          if constexpr (kSomeAhead) finish_block();
        });
      };
      while (!block.is_last()) {
        int steps = 0;
        do step();
        while ((!kSumBetween || ++steps < Sum::kBlocks) && !block.is_last());
        if (!kSumBetween || block.is_last()) break;
        // (In a step, under a condition, it would have the whole softmax wait for P V.)
        long_sum.take(out);
      }
      if constexpr (!kQInRegisters && !kScaled) consumer.release_q();
      consumer.wait_for_v();
      turns.take();
      begin_output();
      turns.pass();
      if constexpr (!Config::kDivided) {
        epilogue.find_row(consumer.tile());
        if constexpr (Probabilities::kSummed) finish_softmax();
      }
      finish_output();
      long_sum.finish(out);
      if constexpr (!Config::kDivided && !Probabilities::kSummed) finish_softmax();
    } else {
      turns.take();
      turns.pass();
      if constexpr (!Config::kDivided) {
        epilogue.find_row(consumer.tile());
        finish_softmax();
      }
    }
    if constexpr (Config::kDivided) {
      if constexpr (Config::kScaledValues) rescale_output(out, {scales.block.v, scales.block.v});
      merge_tile<Config>(params, schedule, tile, shared.part, softmax, out,
                         Config::kProbabilityUnit, first_row, lane);
      return;
    } else {
      epilogue.store_output(maps, consumer.tile(), out, shared.warp_stages);
    }
    consumer.release_tile();
    if (!kScaled && !block.empty()) consumer.q_state.advance();
  }
  if constexpr (Config::kStagedOutput) wait_for_stores_of_warp();  // they read shared memory
}

}  // namespace flash::sm90
