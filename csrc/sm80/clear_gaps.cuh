// A kernel for the rows that belong to no sequence.
#pragma once

#include "common/gaps.h"
#include "host/cuda_check.h"
#include "host/launch.h"
#include "params.h"

namespace flash::sm80 {

// T: of the results. Any grid.
template <typename T, typename Params>
__global__ void __launch_bounds__(32) clear_gaps_kernel(const __grid_constant__ Params params) {
  clear_gaps<T>(params, blockIdx.x, gridDim.x, threadIdx.x);
}

template <typename T, typename Params>
void launch_clear_gaps(const Params& params, cudaStream_t stream) {
  clear_gaps_kernel<T><<<8 * multiprocessors(), 32, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the sm80 kernel for rows of no sequence");
}

}  // namespace flash::sm80
