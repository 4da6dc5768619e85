// Tiles of 16 or 32 rows: the keys of a part are divided among the warps, block by block. Each warp
// loads its own keys and has its own softmax and output, so that no warp waits for another in the
// main loop.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/e4m3.h"
#include "common/scores.h"
#include "common/shared_address.h"
#include "common/softmax.h"
#include "common/warp_matmul.h"
#include "decode/decode_config.cuh"
#include "decode/decode_part.cuh"
#include "decode/e4m3_matmul.h"
#include "decode/key_loader.cuh"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/griddepcontrol.h"

namespace flash::decode {

// Starts the first loads: of a warp's first block, and of the queries.
template <typename Config>
__device__ void start_by_warps(const ForwardParams& params, const Sequence& sequence,
                               const TileRows& tile, KeyLoader<Config>& loader,
                               typename Config::SharedStorage& shared, int warp) {
  const uint32_t ring = shared_address(shared.ring[warp]);
  loader.template load<false>(ring);
  load_queries<Config>(params, sequence, tile, shared_address(shared.q), threadIdx.x,
                       Config::kThreads);
  loader.template load<true>(ring + Config::kSlotBytes);
}

// Loads a part and multiplies by it, each warp for itself. The first loads have started, but behind
// an append.
template <typename Config>
__device__ void attend_by_warps(const ForwardParams& params, const DecodeSchedule& schedule,
                                const Part& part, bool has_sinks, float scale_log2,
                                KeyLoader<Config>& loader, typename Config::SharedStorage& shared,
                                int warp, int lane) {
  using T = typename Config::T;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kRowTiles = Config::kRowTiles, kSlots = Config::kSlots;
  using Rows = LaneRows<Config>;
  const int head_kv = part.tile.head_kv;

  // Loads. Behind an append, rows that are older are read while it runs.
  const int first_key = part.begin + warp * Config::kBlockN;
  const uint32_t q = shared_address(shared.q), ring = shared_address(shared.ring[warp]);
  const auto slot_at = [ring](int i) { return ring + i * Config::kSlotBytes; };
  const auto load_block = [&](int i) {
    loader.template load<false>(slot_at(i));
    if (i + 1 < kSlots) loader.template load<true>(slot_at(i + 1));
  };
  const bool follows = follows_append<Config>(params);
  const int old_keys = part.sequence.seqlen_k - params.seqlen_new;
#pragma unroll 1
  for (int i = follows ? 0 : 2; i < kSlots; i += 2) {
    const int end_key = first_key + i / 2 * part.stride + Config::kBlockN;
    if (follows && end_key > old_keys) ptx::wait_for_earlier_kernels();
    load_block(i);
  }
  if (follows) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
    load_queries<Config>(params, part.sequence, part.tile, q, threadIdx.x, Config::kThreads);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  // A scale is positive: queries have the sign.
  float key_unit = 1.f;
  uint32_t signs = 0;
  if constexpr (Config::kIsE4m3) {
    const float k_descale = descale_of(params.k_descale, part.batch, head_kv);
    if (k_descale < 0.f) signs = 0x80008000;
    key_unit = kE4m3Unit * fabsf(k_descale);
    scale_log2 = scale_log2_of(params, key_unit) + 0.f * key_unit;  // NaN stays
  }
  Rows rows(params, part, 0, has_sinks && warp == 0, scale_log2, key_unit, lane);
  float out[kRowTiles][kHeadDimV / 8][4] = {};

  ptx::cp_async_wait<kSlots - 2>();
  if (schedule.starts_early && first_key + Config::kBlockN > part.end) {
    loader.clear_tail(reinterpret_cast<unsigned char*>(shared.ring[warp][1]), first_key);
  }
  __syncthreads();  // the queries have arrived
  if constexpr (Config::kIsE4m3) {
    order_queries<Config::kThreads, Config::kRows, kHeadDim>(
        reinterpret_cast<unsigned char*>(shared.q), signs);
    __syncthreads();  // they are in order
  }
  int slot = 0;
  const auto next_slot = [&slot] { slot = slot + 1 == kSlots ? 0 : slot + 1; };
#pragma unroll 1
  for (int key = first_key; key < part.end; key += part.stride) {
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // K has arrived
    typename Rows::Scores scores;
    if constexpr (Config::kIsE4m3) {
      compute_e4m3_scores<T, kHeadDim>(scores, q, slot_at(slot), lane);
    } else {
      compute_scores<T, kHeadDim>(scores, q, slot_at(slot), lane);
    }
    __syncwarp();  // all lanes are done with the slot
    loader.template load<kSlots % 2 == 1>(slot_at(slot));
    next_slot();

    rows.transform_scores(scores, params, part, key, lane);
    float factors[2 * kRowTiles];
    if (follow_maxima(rows.softmax, scores, factors, WarpTeam())) rescale_output(out, factors);
    rows.exponentiate(scores);
    typename Rows::Probabilities p;
    Rows::round(p, scores);
    ptx::cp_async_wait<kSlots - 1>();
    __syncwarp();  // V has arrived
    const uint32_t values = slot_at(slot) + Config::ValueLayout::by_columns(lane);
#pragma unroll
    for (int n = 0; n < Config::kKeys / 16; ++n) {
      if constexpr (Config::kIsE4m3) {
        multiply_by_e4m3_values<kHeadDimV>(out, p[n], values, n);
      } else {
        multiply_by_values<T, kHeadDimV, 1>(out, p[n], values, n);
      }
    }
    __syncwarp();  // all lanes are done with the slot
    loader.template load<kSlots % 2 == 0>(slot_at(slot));
    next_slot();
  }
  __syncthreads();  // every warp is done with its ring
  leave_result<Config>(shared, warp, 0, part.tile, rows.softmax, out, lane);
}

}  // namespace flash::decode
