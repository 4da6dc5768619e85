// The end of a tile whose operands have 8 bits.
#pragma once

#include "common/e4m3.h"
#include "common/sequence.h"
#include "common/softmax.h"
#include "params.h"
#include "sm90/forward_config.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/quantised_softmax.cuh"
#include "sm90/store.cuh"
#include "sm90/tma_store.cuh"

namespace flash::sm90 {

// Of a warp. A lane holds elements of rows lane / 4 and lane / 4 + 8 of its 16, and finds the place
// of row lane % 16.
template <typename Config>
struct QuantisedEpilogue {
  using Out = typename Config::Out;
  using Sent = typename Config::Sent;

  const QuantisedParams& params;
  const ForwardSchedule& schedule;
  const int warp_row, lane;  // warp_row: the warp's first, in the tile
  float factors[2];          // what the output is multiplied by
  float descale;
  bool valid;                   // the lane's row holds a query:
  unsigned batch, place, head;  // this one

  // tile: in shared memory, where it is read again instead of occupying registers
  __device__ void find_row(const Sent& tile) {
    const int row = warp_row + lane % kWarpRows;
    const int query = tile.range.m_begin + schedule.query_of(row);
    valid = query < tile.range.m_end;
    batch = tile.range.sequence.q_batch;
    place = tile.range.sequence.q_first + query;
    head = schedule.head_of(tile.head, row);
    descale = descale_of(params.v_descale, tile.batch, tile.head_kv);
  }

  // Writes the log-sum-exp. scale: of the output
  __device__ void finish_softmax(const Sent& tile, SoftmaxState<1>& softmax, float scale) {
    float lse_of[2];
    const auto head_of = [&](int r) {
      return schedule.head_of(tile.head, warp_row + lane / 4 + r * 8);
    };
    finish_quantised_rows(softmax, params.s_aux, head_of, scale * descale, factors, lse_of,
                          lane % 4 == 0);
    const float upper = __shfl_sync(0xffffffff, lse_of[0], lane % 8 * 4);
    const float lower = __shfl_sync(0xffffffff, lse_of[1], lane % 8 * 4);
    if (valid && lane < kWarpRows) {
      params.lse[batch * params.lse_batch_stride + head * params.lse_head_stride + place] =
          lane < 8 ? upper : lower;
    }
  }

  // stages: of all warps, in shared memory
  __device__ void store_output(const ForwardMaps& maps, const Sent& tile,
                               float (&out)[1][Config::kHeadDimV / 8][4],
                               typename Config::WarpStages& stages) const {
    rescale_output(out, factors);
    if constexpr (Config::kStagedOutput) {
      wait_for_stores_of_warp();
      Out* const rows = stages[warp_row / kWarpRows].out;
      stage_accumulators(rows, out[0], lane);
      const int first = tile.range.m_begin + schedule.query_of(warp_row);
      const int last = tile.range.m_begin + schedule.query_of(warp_row + kWarpRows - 1);
      // Behind the last query of a dense sequence there is nothing that a box would overwrite.
      const bool whole = params.cu_seqlens_q == nullptr || last < tile.range.m_end;
      if (!schedule.boxes_out || !whole) {
        store_staged_rows(target(), params.headdim_v, rows, lane);
      } else if (lane == 0) {
        store_boxes<Config::kHeadDimV>(maps.out, rows, schedule.head_of_group(tile),
                                       tile.range.sequence.q_first + first, tile.head_kv,
                                       tile.range.sequence.q_batch);
      }
    } else {
      Out* targets[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto mine = reinterpret_cast<unsigned long long>(target());
        targets[half] = reinterpret_cast<Out*>(__shfl_sync(0xffffffff, mine, lane / 4 + half * 8));
      }
      store_accumulators<Out, 4>(targets, params.headdim_v, out[0], lane);
    }
  }

 private:
  // Where the row goes; null: it holds no query.
  __device__ Out* target() const {
    return valid ? rows_of<Out>(params.out, batch, place, head) : nullptr;
  }
};

}  // namespace flash::sm90
