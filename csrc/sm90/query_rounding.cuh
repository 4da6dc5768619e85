// Queries of 16 bits become operands of 8 bits: the warps that multiply them rotate and round them.
// A query belongs to one tile. So it is rounded once, or where the keys of a tile are divided once
// by each part, and no pass writes it.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "common/sequence.h"
#include "params.h"
#include "ptx/opaque.h"
#include "sm90/rotation.cuh"
#include "sm90/rounding.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

// Of a warp's 16 rows. Its lane 4 g + t has columns 32 i + 8 t .. 32 i + 8 t + 7 of row g and of
// row g + 8.
template <typename Config>
class QueryRounding {
  using T = typename Config::T;
  using Query = typename Config::Out;
  static constexpr int kDim = Config::kHeadDim, kParts = kDim / 32;
  uint4 loaded_[kParts][2];

 public:
  // Begins to load them. What is no query is 0. first_row: that of g, in the tile
  template <typename Schedule>
  __device__ void load(const QuantisedParams& params, const Schedule& schedule, const Tile& tile,
                       const typename Config::Range& range, int first_row, int lane) {
    const int col = lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half, query = range.m_begin + schedule.query_of(row);
      const bool valid = row < schedule.rows * schedule.group && query < range.m_end;
      const Query* const source =
          rows_of<const Query>(params.q, range.sequence.q_batch, range.sequence.q_first + query,
                               schedule.head_of(tile.head, row)) +
          col;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        loaded_[i][half] = make_uint4(0, 0, 0, 0);
        if (valid && 32 * i + col < params.headdim_q) {
          loaded_[i][half] = *reinterpret_cast<const uint4*>(source + 32 * i);
        }
      }
    }
  }

  // Writes them to a tile of Q; WGMMA reads them behind a barrier. scale: of rows g and g + 8
  // tile: (kParts<T, kDim>, kBlockM, kBoxCols<T>)
  __device__ void round(T* tile, float (&scale)[2], int first_row, int lane) const {
    using Rotation = RandomRotation<Query, kDim>;
    typename Rotation::Rows x;
    Rotation::apply(x, ptx::opaque(lane), [&](int i, int half) { return loaded_[i][half]; });
    const float norm = rsqrtf(static_cast<float>(kDim));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = step_of<T>(largest_of_lanes(largest_of_row(x, half), 4) * norm);
      const int row = first_row + 8 * half;
      round_row<T>(x, half, __fdividef(norm, scale[half]), [&](int i, uint2 numbers) {
        const int place = place_of_chunk<Config::kBlockM>(row, 2 * i + lane % 4 / 2) + lane % 2 * 8;
        *reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(tile) + place) = numbers;
      });
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  }
};

}  // namespace flash::sm90
