// Functions of the driver, looked up at run time, so that nothing links it. Host code.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "host/cuda_check.h"

namespace flash {

template <typename Function>
Function* find_in_driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
             name);
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("the driver has no ") + name +
                             ": it is older than CUDA 12");
  }
  return reinterpret_cast<Function*>(function);
}

// Whether the thread has a current context, which functions of the driver want. The runtime gives
// it one at the first call that needs it.
inline bool has_context() {
  static const auto get_current = find_in_driver<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  return get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

}  // namespace flash
