// TMA stores of a warp's rows from shared memory. They run beside what the warp does next.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include "sm90/tile_layout.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// Has TMA copy a tile of kWarpRows rows, by one lane of the warp that wrote it.
// tile: (kParts<T, kCols>, kWarpRows, kBoxCols<T>), which all lanes have fenced
// place: of its first row in the map's outer dimensions, innermost first
template <int kCols, typename T, typename... Place>
__device__ void store_boxes(const CUtensorMap& map, const T* tile, Place... place) {
#pragma unroll
  for (int part = 0; part < kParts<T, kCols>; ++part) {
    cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_global, cuda::ptx::space_shared, &map,
                                    {part * kBoxCols<T>, place...},
                                    tile + part * kWarpRows * kBoxCols<T>);
  }
  cuda::ptx::cp_async_bulk_commit_group();
}

// By a warp, before it writes again what its stores read.
__device__ inline void wait_for_stores_of_warp() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>());
  __syncwarp();
}

}  // namespace flash::sm90
