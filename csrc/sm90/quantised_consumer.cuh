// The consumers of operands in 8 bits.
//
// A block of 128 keys, which has one scale, is two steps of 64 keys. Matmuls run ahead: while a
// warpgroup is at the softmax of a step, tensor cores compute the output of the step before and the
// scores of the step behind.
//
// Tensor cores add products of 8 bits with about 14 bits: in a long row, what a block adds would
// vanish beside the sum so far. Where there are registers for it, a block's output is computed on
// its own and added in float32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mask.h"
#include "common/scores.h"
#include "common/softmax.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "ptx/named_barrier.h"
#include "ptx/opaque.h"
#include "ptx/wgmma.h"
#include "sm90/forward_parts.cuh"
#include "sm90/quantised_softmax.cuh"

namespace flash::sm90 {

constexpr int kLoop = 0;
constexpr bool kTurnsQ = false;
constexpr int kPromoteBlocks = 4;
constexpr int kStepKeys = kLoop == 1 ? 128 : 64;
// The steps of a block, keys from the last to the first: their first rows in it.
constexpr int kFirstRow = kScaledKeys - 64, kSecondRow = 0;

template <bool kFirst, typename T>
__device__ T& choose(T& first, T& second) {
  if constexpr (kFirst) return first;
  return second;
}

template <typename Config>
__device__ void consume_quantised(const QuantisedParams& params, const ForwardSchedule& schedule,
                                  float scale_log2, typename Config::SharedStorage& shared,
                                  int warpgroup) {
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr bool kPromotes = kPromoteBlocks > 0 && Config::kHeadDimV <= 128;
  int since = 0;
  enum { kTurn = 1 };
  const int next_warpgroup = warpgroup + 1 == Config::kConsumers ? 0 : warpgroup + 1;
  const auto take_turn = [&] { if (kTurnsQ) ptx::bar_sync(kTurn + warpgroup, 2 * kWarpgroup); };
  const auto pass_turn = [&] { if (kTurnsQ) ptx::bar_arrive(kTurn + next_warpgroup, 2 * kWarpgroup); };
  if (next_warpgroup == 0) pass_turn();
  constexpr int kOutTiles = Config::kHeadDimV / 8;
  static_assert(Config::kBlockN == kScaledKeys);
  using Score = typename Config::Score;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int first_row = warpgroup * kWarpgroupRows + thread / 32 * 16 + lane / 4;  // and + 8
  const auto query_of = [&](int row) { return schedule.query_of(row); };
  const int first_query = query_of(warpgroup * kWarpgroupRows);
  const int last_query = query_of(warpgroup * kWarpgroupRows + kWarpgroupRows - 1);

  Consumer<Config> consumer{shared, warpgroup, lane};
  auto& kv_state = consumer.kv_state;
  // Of the first and the second step of a block.
  Score scores[kLoop == 1 ? 1 : 2][1][kStepKeys / 8][4];
  uint32_t p[2][kStepKeys / kWgmmaDepth<typename Config::V>][4];
  for (;;) {
    const Tile tile = consumer.receive_tile();
    if (tile.batch < 0) break;
    const TileRange<Config> range(params, schedule, tile);
    // Of the warpgroup's queries, one sees keys up to seen_end, all see all_begin .. all_end - 1.
    const bool has_queries = warp_uniform(range.m_begin + first_query) < range.m_end;
    const int first = range.position + first_query, last = range.position + last_query;
    const int seen_end = has_queries ? range.mask.end_key(last) : 0;
    const int all_begin = range.mask.first_key(last), all_end = range.mask.end_key(first);

    since = 0;
    float out[1][kOutTiles][4] = {};
    [[maybe_unused]] float block_out[1][kOutTiles][4];
    auto& products = choose<kPromotes>(block_out, out);
    ptx::wait_for_earlier_kernels();
    const float no_sinks[2] = {-INFINITY, -INFINITY};
    SoftmaxState<1> softmax(scale_log2, no_sinks, false);
    const ScoreTransform transform(params, tile.batch, tile.head, range.mask.shift);
    TileScales<kFull> scales(params, schedule, tile, range.sequence, range.m_begin, first_row);
    Exponents exponents;
    const auto take_scales = [&](auto k) {
      scales.block = consumer.scales_of(k);
      exponents = exponents_of(scales, softmax.scale_log2, Score{});
    };

    // P of a step; n: its first key. Whether references rose, see quantised_softmax_step.
    const auto softmax_step = [&](auto step, int n, float (&factors)[2]) {
      constexpr int kStep = decltype(step)::value;
      const int key = n + lane % 4 * 2;
      const int row = ptx::opaque(range.position);  // or what follows would occupy registers
      bool rise;
      as_floats(scores[kLoop == 1 ? 0 : kStep], [&](float (&scores)[1][kStepKeys / 8][4]) {
        const auto mask_scores = [&] {
          if (n + kStepKeys <= all_end && n >= all_begin) return;
          const auto row_of = [&](int, int half) { return row + query_of(first_row + half * 8); };
          apply_mask(scores, range.mask, row_of, key);
          if constexpr (!kFull) keep_hidden(scores, scales.q[0]);
        };
        scales.apply(scores, Score{});
        if constexpr (kFull) {
          transform.apply(scores, row + first_row, key, mask_scores, [](int, int, int, float) {});
        }
        mask_scores();
        rise = quantised_softmax_step(p[kStep], softmax, scores, exponents, scales.block.unit,
                                      factors);
      });
      return rise;
    };
    constexpr std::integral_constant<int, 0> kFirst{};
    constexpr std::integral_constant<int, 1> kSecond{};

    const auto promote = [&] {
      if constexpr (kPromotes) {
        if (++since == kPromoteBlocks) {
          for_each(out, [&](float& x, int m, int n, int j) { x += block_out[m][n][j]; });
          since = 0;
        }
      }
    };
    Epilogue<Config> epilogue;
    auto block = range.blocks;
    bool more = !block.empty();
    // Around a diagonal a warpgroup may see none of the first blocks. Without queries it sees none.
    while (more && block.key() >= seen_end) {
      more = !block.is_last();
      consumer.skip_block(!more);
      take_turn();
      pass_turn();
      block.advance();
    }
    if (more) {
      float factors[2];
      if constexpr (kLoop == 0) {
      consumer.wait_for_q();
      consumer.wait_for_k(kv_state);
      consumer.begin_scores(scores[0], kv_state, kFirstRow);
      take_scales(kv_state);
      ptx::wgmma_wait<0>(scores[0][0]);
      consumer.begin_scores(scores[kLoop == 1 ? 0 : 1], kv_state, kSecondRow);
      softmax_step(kFirst, block.key() + kFirstRow, factors);
      ptx::wgmma_wait<0>(scores[kLoop == 1 ? 0 : 1][0]);
      consumer.release_k(kv_state);
      while (!block.is_last()) {
        const int n = block.key();
        block.advance();
        // The second step of a block, and the first of the next.
        consumer.wait_for_v();
        consumer.template begin_quantised_output<kFirstRow>(products, p[0], !kPromotes || since > 0);
        consumer.wait_for_k(kv_state.next());
        consumer.begin_scores(scores[0], kv_state.next(), kFirstRow);
        bool rise = softmax_step(kSecond, n + kSecondRow, factors);
        ptx::wgmma_wait<0>(products[0]);
        ptx::wgmma_wait<0>(scores[0][0]);
        if (rise) {
          rescale_output(out, factors);
          if constexpr (kPromotes) rescale_output(block_out, factors);
        }

        consumer.template begin_quantised_output<kSecondRow>(products, p[1], true);
        consumer.begin_scores(scores[kLoop == 1 ? 0 : 1], kv_state.next(), kSecondRow);
        take_scales(kv_state.next());
        rise = softmax_step(kFirst, block.key() + kFirstRow, factors);
        ptx::wgmma_wait<0>(products[0]);
        ptx::wgmma_wait<0>(scores[kLoop == 1 ? 0 : 1][0]);
        consumer.release_v();
        kv_state.advance();
        consumer.release_k(kv_state);
        if (rise) {
          rescale_output(out, factors);
          if constexpr (kPromotes) rescale_output(block_out, factors);
        }
        promote();
      }
      consumer.release_q();
      consumer.wait_for_v();
      consumer.template begin_quantised_output<kFirstRow>(products, p[0], !kPromotes || since > 0);
      const bool rise = softmax_step(kSecond, block.key() + kSecondRow, factors);
      ptx::wgmma_wait<0>(products[0]);
      if (rise) {
        rescale_output(out, factors);
        if constexpr (kPromotes) rescale_output(block_out, factors);
      }
      consumer.template begin_quantised_output<kSecondRow>(products, p[1], true);
      ptx::wgmma_wait<0>(products[0]);
      consumer.release_v();
      kv_state.advance();
      since = kPromoteBlocks - 1;
      promote();
      } else {
      consumer.wait_for_q();
      consumer.wait_for_k(kv_state);
      consumer.begin_scores(scores[0], kv_state, 0);
      take_scales(kv_state);
      ptx::wgmma_wait<0>(scores[0][0]);
      consumer.release_k(kv_state);
      softmax_step(kFirst, block.key(), factors);
      while (!block.is_last()) {
        block.advance();
        consumer.wait_for_v();
        consumer.wait_for_k(kv_state.next());
        take_turn();
        consumer.begin_scores(scores[0], kv_state.next(), 0);
        consumer.template begin_quantised_output<0>(products, p[0], !kPromotes || since > 0);
        pass_turn();
        take_scales(kv_state.next());
        ptx::wgmma_wait<1>(scores[0][0]);
        consumer.release_k(kv_state.next());
        const bool rise = softmax_step(kSecond, block.key(), factors);
        ptx::wgmma_wait<0>(products[0]);
        consumer.release_v();
        kv_state.advance();
        if (rise) {
          rescale_output(out, factors);
          if constexpr (kPromotes) rescale_output(block_out, factors);
        }
        promote();
#pragma unroll
        for (int n = 0; n < kStepKeys / 32; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[0][n][i] = p[1][n][i];
      }
      consumer.release_q();
      consumer.wait_for_v();
      take_turn();
      consumer.template begin_quantised_output<0>(products, p[0], !kPromotes || since > 0);
      pass_turn();
      ptx::wgmma_wait<0>(products[0]);
      consumer.release_v();
      kv_state.advance();
      since = kPromoteBlocks - 1;
      promote();
      }
    }
    const bool is_split = schedule.splits > 1;
    if (!is_split || merge_tile<Config>(params, schedule, tile, softmax, out, first_row, lane)) {
      epilogue.finish_softmax(params, schedule, tile, softmax, kProbabilityUnit, first_row, lane);
      epilogue.store_output(params, out, lane);
    }
    if (!block.empty()) consumer.q_state.advance();
  }
}

}  // namespace flash::sm90
