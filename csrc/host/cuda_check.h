// CUDA errors as C++ exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flash {

// Throws unless `status` is success; `call` is what the user will read, the name of the failed
// call.
inline void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the exception tells of it: the caller's next launch does not fail of it
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

}  // namespace flash
