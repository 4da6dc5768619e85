// The consumers of operands in 8 bits.
//
// They take no turns, unlike those of 16 bits: exponentials take most of the time, and warps that
// are not held to an order keep the special-function units busier.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/fragment.h"
#include "common/mask.h"
#include "common/scores.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/forward_parts.cuh"
#include "sm90/long_sum.cuh"
#include "sm90/quantised_softmax.cuh"

namespace flash::sm90 {

template <typename Config>
__device__ void consume_quantised(const QuantisedParams& params, const ForwardSchedule& schedule,
                                  float scale_log2, typename Config::SharedStorage& shared,
                                  int warpgroup) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kBlockN = Config::kBlockN, kOutTiles = Config::kHeadDimV / 8;
  using Score = typename Config::Score;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int first_row = warpgroup * kWarpgroupRows + thread / 32 * 16 + lane / 4;  // and + 8
  const auto query_of = [&](int row) { return schedule.query_of(row); };
  const int first_query = query_of(warpgroup * kWarpgroupRows);
  const int last_query = query_of(warpgroup * kWarpgroupRows + kWarpgroupRows - 1);

  Consumer<Config> consumer{shared, warpgroup, lane};
  auto& kv_state = consumer.kv_state;
  Score scores[1][kBlockN / 8][4];
  uint32_t p[kBlockN / kWgmmaDepth<typename Config::V>][4];
  for (;;) {
    const Tile tile = consumer.receive_tile();
    if (tile.batch < 0) break;
    const TileRange<Config> range(params, schedule, tile);
    // Of the warpgroup's queries, one sees keys up to seen_end, all see all_begin .. all_end - 1.
    const bool has_queries = warp_uniform(range.m_begin + first_query) < range.m_end;
    const int first = range.position + first_query, last = range.position + last_query;
    const int seen_end = has_queries ? range.mask.end_key(last) : 0;
    const int all_begin = range.mask.first_key(last), all_end = range.mask.end_key(first);

    float out[1][kOutTiles][4] = {};
    ptx::wait_for_earlier_kernels();
    const float no_sinks[2] = {-INFINITY, -INFINITY};
    SoftmaxState<1> softmax(scale_log2, no_sinks, false);
    float allowed = kFewReferences;
    LongSum<Config> long_sum(shared.sums);
    const ScoreTransform transform(params, tile.batch, tile.head, range.mask.shift);
    TileScales<kFull> scales(params, schedule, tile, range.sequence, range.m_begin, first_row);
    // The probabilities of the block that begins with key n.
    const auto softmax_block = [&](bool first, int n) {
      const int key = n + lane % 4 * 2;
      const int row = ptx::opaque(range.position);  // or what follows would occupy registers
      as_floats(scores, [&](float (&scores)[1][kBlockN / 8][4]) {
        const auto mask_scores = [&] {
          if (n + kBlockN <= all_end && n >= all_begin) return;
          const auto row_of = [&](int, int half) { return row + query_of(first_row + half * 8); };
          apply_mask(scores, range.mask, row_of, key);
          if constexpr (!kFull) keep_hidden(scores, scales.q[0]);
        };
        scales.apply(scores, Score{});
        if constexpr (kFull) {
          transform.apply(scores, row + first_row, key, mask_scores, [](int, int, int, float) {});
        }
        mask_scores();
        const Exponents exponents = exponents_of(scales, softmax.scale_log2, Score{});
        quantised_softmax_step(p, softmax, scores, exponents, scales.block.unit, first, allowed,
                               [&](const float (&factors)[2]) {
                                 rescale_output(out, factors);
                                 long_sum.rescale(factors);
                               });
      });
    };

    auto block = range.blocks;
    bool more = !block.empty();
    // Around a diagonal a warpgroup may see none of the first blocks. Without queries it sees none.
    while (more && block.key() >= seen_end) {
      more = !block.is_last();
      consumer.skip_block(!more);
      block.advance();
    }
    if (more) {
      consumer.wait_for_q();
      consumer.wait_for_k(kv_state);
      consumer.begin_scores(scores, kv_state);
      scales.block = consumer.scales_of(kv_state);
      ptx::wgmma_wait<0>(scores[0]);
      consumer.release_k(kv_state);
      // Each step: the scores of the next block of keys, and the output of this one. (The softmax
      // of the first block stands in the loop too: a second copy of it makes the loop slower.)
      for (bool first = true;; first = false) {
        softmax_block(first, block.key());
        if (block.is_last()) break;
        block.advance();
        consumer.wait_for_k(kv_state.next());
        consumer.begin_scores(scores, kv_state.next());
        consumer.wait_for_v();
        consumer.begin_quantised_output(out, p, !long_sum.is_fresh());
        scales.block = consumer.scales_of(kv_state.next());
        ptx::wgmma_wait<1>(scores[0]);
        consumer.release_k(kv_state.next());
        ptx::wgmma_wait<0>(out[0]);
        consumer.release_v();
        kv_state.advance();
        long_sum.count(out);
      }
      consumer.release_q();
      consumer.wait_for_v();
      consumer.begin_quantised_output(out, p, !long_sum.is_fresh());
      ptx::wgmma_wait<0>(out[0]);
      consumer.release_v();
      kv_state.advance();
      long_sum.finish(out);
    }
    if constexpr (Config::kDivided) {
      merge_tile<Config>(params, schedule, tile, shared.part, softmax, out, kProbabilityUnit,
                         first_row, lane);
      return;
    } else {
      Epilogue<Config> epilogue;
      epilogue.finish_softmax(params, schedule, tile, softmax, kProbabilityUnit, first_row, lane);
      epilogue.store_output(params, out, lane);
    }
    if (!block.empty()) consumer.q_state.advance();
  }
}

}  // namespace flash::sm90
