// dK and dV on their way out: by way of shared memory, from where TMA brings them to their place
// while the next tile begins. If the steps of a tile are divided into parts, each part leaves them
// in a workspace, and the end kernel adds them up.
#pragma once

#include <cstdint>

#include "common/fragment.h"
#include "common/parts.h"
#include "common/sequence.h"
#include "params.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/store.cuh"
#include "sm90/tma_store.cuh"

namespace flash::sm90 {

// The workspace: for each divided tile and part (16 keys, columns of dK and then of dV / 8, 32
// lanes), accumulators of m16n8.
template <typename Config>
struct PartLayout {
  static constexpr int kColTiles = (Config::kHeadDim + Config::kHeadDimV) / 8;
  static constexpr int kPartSize = Config::kBlockN / 16 * kColTiles * 32;

  // Of the first part. group: 16 keys of the tile
  static __device__ float4* place(const BackwardParams& params, const BackwardSchedule& schedule,
                                  const Tile& tile, int group) {
    return reinterpret_cast<float4*>(params.partial_dkv) +
           int64_t{tile.place} * schedule.splits * kPartSize + group * (kColTiles * 32);
  }
};

// What dK or dV is multiplied by in the end.
template <typename Config, bool kOfV, int kColTiles>
__device__ void scale_gradient(const BackwardParams& params, float (&x)[1][kColTiles][4]) {
  if (!kOfV) scale_by(x, params.gradient_scale);
  if (kOfV && Config::kFull && params.rng_state != nullptr) scale_by(x, params.dropout_scale);
}

// Scales and stores columns of dK or dV of 16 keys, from key `key` of the sequence and column `col`
// on.
template <typename Config, bool kOfV, int kColTiles>
__device__ void store_gradient(const BackwardParams& params, int batch, int head, int key, int col,
                               float (&x)[1][kColTiles][4], int lane) {
  using T = typename Config::T;
  scale_gradient<Config, kOfV>(params, x);
  const Sequence sequence(params, batch);
  T* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int lane_key = key + half * 8 + lane / 4;
    rows[half] = nullptr;
    if (lane_key < sequence.seqlen_k) {
      rows[half] = rows_of<T>(kOfV ? params.dv : params.dk, sequence.k_batch,
                              sequence.k_first + lane_key, head) +
                   col;
    }
  }
  store_accumulators<T, 4>(rows, (kOfV ? params.headdim_v : params.headdim) - col, x[0], lane);
}

// Scales dK or dV of 16 keys, from key `key` of the sequence on, writes them to shared memory and
// has TMA store them. It reads until wait_for_stores_of_warp.
// stage: (kParts, kWarpRows, kBoxCols<T>), of the warp
template <typename Config, bool kOfV, int kColTiles>
__device__ void send_gradient(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardSchedule& schedule, const Sequence& sequence, int head,
                              int key, typename Config::T* stage, float (&x)[1][kColTiles][4],
                              int lane) {
  using T = typename Config::T;
  scale_gradient<Config, kOfV>(params, x);
  stage_accumulators(stage, x[0], lane);
  // Behind the last key of a dense sequence there is nothing that a box would overwrite.
  if (!schedule.clear_tail_k || key + kWarpRows <= sequence.seqlen_k) {
    if (lane == 0) {
      store_boxes<kColTiles * 8>(kOfV ? maps.dv : maps.dk, stage, sequence.k_first + key, head,
                                 sequence.k_batch);
    }
    return;
  }
  const int lane_key = key + lane % kWarpRows;
  T* const row =
      rows_of<T>(kOfV ? params.dv : params.dk, sequence.k_batch, sequence.k_first + lane_key, head);
  store_staged_rows(lane_key < sequence.seqlen_k ? row : nullptr,
                    kOfV ? params.headdim_v : params.headdim, stage, lane);
}

// By a warp that has them: dK or dV of 16 keys of a tile, straight from registers.
template <typename Config, bool kOfV, int kColTiles>
__device__ void finish_gradient(const BackwardParams& params, const BackwardSchedule& schedule,
                                const Tile& tile, int n_block, int group,
                                float (&x)[1][kColTiles][4], int lane) {
  using Layout = PartLayout<Config>;
  if (tile.parts == 1) {
    const int key = n_block * Config::kBlockN + group * 16;
    store_gradient<Config, kOfV>(params, tile.batch, tile.head_kv, key, 0, x, lane);
  } else {
    leave_part(Layout::place(params, schedule, tile, group) + tile.part * Layout::kPartSize +
                   (kOfV ? Config::kHeadDim / 8 * 32 : 0),
               x, lane);
  }
}

}  // namespace flash::sm90
