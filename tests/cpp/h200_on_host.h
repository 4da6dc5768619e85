// Included by a test of host code that asks the CUDA runtime: it finds an H200.
#pragma once

#include <cuda_runtime.h>

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 132, cudaSuccess;  // SMs
}
const char* cudaGetErrorName(cudaError_t) { return ""; }
const char* cudaGetErrorString(cudaError_t) { return ""; }
}
