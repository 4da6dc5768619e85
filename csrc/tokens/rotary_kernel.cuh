// Rotary embedding of tokens, out of place or in place.
#pragma once

#include "common/sequence.h"
#include "params.h"
#include "ptx/griddepcontrol.h"
#include "tokens/move_token.cuh"

namespace flash::tokens {

// The sequence of a packed token; -1: it belongs to none.
// cu_seqlens: (batch + 1), not decreasing
__device__ inline int sequence_of(const RotaryParams& params, int token) {
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
  return low == params.batch || token < bounds[0] ? -1 : low;
}

// Grid: (tokens of a sequence, sequences); packed tokens count as one sequence.
// kOverlaps: launched so that it starts while the kernel before is ending, and lets the next one.
template <typename T, typename Table, int kPairs, bool kInterleaved, bool kOverlaps>
__global__ void __launch_bounds__(kTokenThreads)
    rotary_kernel(const __grid_constant__ RotaryParams params) {
  if constexpr (kOverlaps) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
  }
  const bool packed = params.cu_seqlens != nullptr;
  const int row = blockIdx.x * blockDim.z + threadIdx.z;
  if (row >= params.seqlen) return;
  const int batch_end = packed ? 1 : params.batch;
  for (int batch = blockIdx.y; batch < batch_end; batch += gridDim.y) {
    const int sequence = packed ? sequence_of(params, row) : batch;
    const int first = packed && sequence >= 0 ? params.cu_seqlens[sequence] : 0;
    const int offset =
        params.offsets == nullptr || sequence < 0 ? params.offset : params.offsets[sequence];
    TokenAngles<Table> angles(params.rotation, row - first, offset);
    if (sequence < 0) angles.cos = nullptr;
    if (params.in_place && angles.cos == nullptr) continue;
    move_token<kPairs, kInterleaved>(rows_of<const T>(params.x, batch, row, 0),
                                     params.x.head_stride, rows_of<T>(params.out, batch, row, 0),
                                     params.out.head_stride, params.nheads, params.headdim, angles,
                                     params.rotation.pairs, [](int) { return 1.f; });
  }
}

}  // namespace flash::tokens
