// Rotary embedding of tokens, out of place or in place.
#pragma once

#include "common/rotary.h"
#include "common/sequence.h"
#include "params.h"

namespace flash::sm80 {

// Position of a token of packed sequences; -1: it belongs to none.
// cu_seqlens: (batch + 1), not decreasing
__device__ inline int packed_position(const RotaryParams& params, int token) {
  const int* const bounds = params.cu_seqlens;
  int low = 0, high = params.batch;  // the first sequence that ends behind the token
  while (low < high) {
    const int middle = (low + high) / 2;
    if (bounds[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == params.batch || token < bounds[0]) return -1;
  const int offset = params.offsets == nullptr ? params.offset : params.offsets[low];
  return max(token - bounds[low] + offset, 0);
}

// Grid: (tokens of a sequence, sequences); packed tokens count as one sequence.
template <typename T, typename Table, int kPairs>
__global__ void __launch_bounds__(256) rotary_kernel(const __grid_constant__ RotaryParams params) {
  const bool packed = params.cu_seqlens != nullptr;
  const int row = blockIdx.x * blockDim.z + threadIdx.z;
  if (row >= params.seqlen) return;
  const int batch_end = packed ? 1 : params.batch;
  for (int batch = blockIdx.y; batch < batch_end; batch += gridDim.y) {
    const int offset = params.offsets == nullptr ? params.offset : params.offsets[batch];
    const int position = packed ? packed_position(params, row) : max(offset + row, 0);
    TokenAngles<Table> angles(params.rotation, position);
    if (position < 0) angles.cos = nullptr;
    if (params.in_place && angles.cos == nullptr) continue;
    move_token<kPairs>(rows_of<const T>(params.x, batch, row, 0), params.x.head_stride,
                       rows_of<T>(params.out, batch, row, 0), params.out.head_stride, params.nheads,
                       params.headdim, angles, params.rotation.pairs, params.rotation.interleaved);
  }
}

}  // namespace flash::sm80
