// The pass before attention of operands in e4m3: values are transposed, and nothing else.
//
// A unit is 128 keys, as they share a place (scaled_blocks.cuh), by 64 columns of one head: two
// squares. Each warp has TMA bring units ahead, transposes them where they lie and has TMA store
// them: it meets no other warp.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "common/shared_address.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "sm90/pipeline.cuh"
#include "sm90/scaled_blocks.cuh"
#include "sm90/square_transposer.cuh"
#include "sm90/tma_load.cuh"

namespace flash::sm90 {

constexpr int kTransposeWarps = 4, kTransposeThreads = 32 * kTransposeWarps;
constexpr int kTransposeBlocks = 2;  // an SM

// Boxes are squares.
struct TransposeMaps {
  CUtensorMap rows;        // (batch, nheads_kv, rows, headdim_v)
  CUtensorMap transposed;  // (batch, nheads_kv, headdim_v, places)
};

// Of a warp.
struct TransposeStages {
  static constexpr int kStages = 3, kSquares = kScaledKeys / kSquareRows;
  alignas(1024) uint8_t squares[kStages][kSquares][kSquareBytes];
  uint64_t full[kStages];
  QuantisedRows rows[kStages];
};

// Units of 128 keys of a head with kDim columns.
template <int kDim>
constexpr int kUnitsOfTile = (kDim + kSquareRows - 1) / kSquareRows;

template <int kDim>
class ValueTransposer {
  static constexpr int kColumns = kUnitsOfTile<kDim>;
  static constexpr int kStages = TransposeStages::kStages, kSquares = TransposeStages::kSquares;
  const QuantiseParams& params_;
  const TransposeMaps& maps_;
  TransposeStages& shared_;
  const int lane_;

 public:
  __device__ ValueTransposer(const QuantiseParams& params, const TransposeMaps& maps,
                             TransposeStages& shared, int lane)
      : params_(params), maps_(maps), shared_(shared), lane_(lane) {
    if (lane != 0) return;
    for (uint64_t& barrier : shared.full) init_barrier(barrier, 1);
    fence_barrier_init();
  }

  // Takes units `first`, `first` + `step` and so on, before `end`.
  __device__ void run(int first, int step, int end) {
    PipelineState<kStages> loaded, taken;
    const SquareTransposer transposer(lane_);
    if (lane_ == 0) {
      for (int i = 0; i < kStages - 1; ++i, loaded.advance()) load(first + i * step, end, loaded);
    }
    __syncwarp();
    for (int unit = first; unit < end; unit += step, taken.advance()) {
      if (lane_ == 0) {
        // The last unit's store has read the stage.
        cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>());
        load(unit + (kStages - 1) * step, end, loaded);
        loaded.advance();
      }
      const int stage = taken.stage();
      wait(shared_.full[stage], taken.phase());
      __syncwarp();
      const QuantisedRows rows = shared_.rows[stage];
      __syncwarp();
      if (rows.count == 0) continue;  // of no sequence
      auto& squares = shared_.squares[stage];
      if (rows.count < kScaledKeys) {
        for (int i = 0; i < kSquares; ++i) {
          clear_rows(squares[i], rows.count - i * kSquareRows, lane_);
        }
      }
      transposer.transpose_two<kSquareBytes>(shared_address(squares));
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
      __syncwarp();
      if (lane_ == 0) store(rows, column_of(unit), squares);
    }
    if (lane_ == 0) cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
  }

 private:
  __device__ int column_of(int unit) const { return unit % kColumns * kSquareRows; }

  // By one lane. (Where no rows are loaded the phase ends too.)
  __device__ void load(int unit, int end, PipelineState<kStages> state) {
    if (unit >= end) return;
    const int stage = state.stage();
    const QuantisedRows rows = keys_of_tile(params_, unit / kColumns);
    shared_.rows[stage] = rows;
    auto& squares = shared_.squares[stage];
    const int count = (rows.count + kSquareRows - 1) / kSquareRows;
    arrive_expecting(shared_.full[stage], count * kSquareBytes);
    for (int i = 0; i < count; ++i) {
      load_columns(squares[i], maps_.rows, shared_.full[stage], column_of(unit),
                   rows.first + i * kSquareRows, rows.head, rows.batch);
    }
  }

  // By one lane.
  __device__ void store(const QuantisedRows& rows, int column,
                        const uint8_t (&squares)[kSquares][kSquareBytes]) const {
    for (int i = 0; i < kSquares; ++i) {
      const int place = rows.block * kScaledKeys + i * kSquareRows;
      cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_global, cuda::ptx::space_shared,
                                      &maps_.transposed, {place, column, rows.head, rows.batch},
                                      squares[i]);
    }
    cuda::ptx::cp_async_bulk_commit_group();
  }
};

// Grid: thread blocks whose warps share the units.
template <int kDim>
__global__ void __launch_bounds__(kTransposeThreads, kTransposeBlocks)
    transpose_kernel(const __grid_constant__ QuantiseParams params,
                     const __grid_constant__ TransposeMaps maps, int units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = threadIdx.x / 32;
  ValueTransposer<kDim> transposer(params, maps, reinterpret_cast<TransposeStages*>(memory)[warp],
                                   threadIdx.x % 32);
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  transposer.run(blockIdx.x * kTransposeWarps + warp, gridDim.x * kTransposeWarps, units);
}

}  // namespace flash::sm90
