// TMA loads of a block of rows into a tile in shared memory (tile_layout.cuh).
//
// A tensor map says where a tensor's rows lie, dense or with any strides (tensor_map.h). In a paged
// cache each box of rows is found through the block table. All lanes of a warp load together.
// `full` is the barrier that then completes its phase.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "common/sequence.h"
#include "params.h"
#include "ptx/opaque.h"
#include "sm90/pipeline.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_scheduler.cuh"

namespace flash::sm90 {

// Rows `row` .. `row + kRows - 1` of a sequence's keys or values, in boxes of box_rows.
// tile: (kParts<kCols>, kRows, kBoxCols)
// map: (slots, nheads_kv, rows, headdim), box: box_rows
template <int kRows, int kCols, typename T>
__device__ void load_keys(T* tile, const CUtensorMap& map, uint64_t& full,
                          const ForwardParams& params, int box_rows, const Sequence& sequence,
                          int batch, int row, int head_kv, int lane) {
  if (lane == 0) arrive_expecting(full, kRows * kParts<kCols> * kPartRowBytes);
  __syncwarp();
#pragma unroll 1  // registers are few here
  for (int box_row = ptx::opaque(lane) * box_rows; box_row < kRows; box_row += 32 * box_rows) {
    int slot = sequence.k_batch, slot_row = ptx::opaque(sequence.k_first) + row + box_row;
    if (params.block_table != nullptr) {
      // Past the table's end it fetches some page: what lies outside the sequence is hidden.
      const int page = min(slot_row, params.seqlen_k - 1) / params.page_size;
      slot = params.block_table[ptx::opaque(batch) * params.block_table_stride + page];
      slot = min(max(slot, 0), params.slots_k - 1);
      slot_row %= params.page_size;
    }
#pragma unroll
    for (int part = 0; part < kParts<kCols>; ++part) {
      cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global,
                                      tile + (part * kRows + box_row) * kBoxCols, &map,
                                      {part * kBoxCols, slot_row, head_kv, slot}, &full);
    }
  }
}

// The queries of a tile, in one box: rows from `row` on of a sequence, for all heads of the tile.
// q: (kParts<kCols>, kRows, kBoxCols)
// map: (batch, nheads_kv, rows, nheads / nheads_kv, headdim)
template <int kRows, int kCols, typename T>
__device__ void load_queries(T* q, const CUtensorMap& map, uint64_t& full,
                             const TileSchedule& schedule, const Tile& tile,
                             const Sequence& sequence, int row, int lane) {
  if (lane == 0) {
    arrive_expecting(full, schedule.rows * schedule.group * kParts<kCols> * kPartRowBytes);
  }
  __syncwarp();
  if (lane < kParts<kCols>) {
    cuda::ptx::cp_async_bulk_tensor(
        cuda::ptx::space_cluster, cuda::ptx::space_global, q + lane * kRows * kBoxCols, &map,
        {ptx::opaque(lane) * kBoxCols, ptx::opaque(tile.head) % schedule.heads_of_kv,
         sequence.q_first + row, tile.head_kv, sequence.q_batch},
        &full);
  }
}

// Zeros rows `valid_rows` .. kRows - 1 of a tile that has arrived, by one warp: of values behind a
// sequence's last. Their probabilities are 0, but 0 * NaN is NaN.
template <int kRows, int kCols, typename T>
__device__ void clear_tail(T* tile, int valid_rows, int lane) {
  constexpr int kChunks = kBoxCols / 8;  // of a row of a part
#pragma unroll 1
  for (int i = valid_rows * kChunks + lane; i < kRows * kChunks; i += 32) {
#pragma unroll
    for (int part = 0; part < kParts<kCols>; ++part) {
      auto* const rows = reinterpret_cast<uint4*>(tile + part * kRows * kBoxCols);
      rows[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

}  // namespace flash::sm90
