// Included by a test of plans, which ask the CUDA runtime: they find an H200.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 132, cudaSuccess;  // SMs
}
const char* cudaGetErrorName(cudaError_t) { return ""; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return ""; }
}

// Of dense sequences; nothing is given.
inline flash::ForwardParams dense_forward(int batch, int seqlen_q, int seqlen_k, int nheads,
                                          int nheads_kv, bool causal) {
  flash::ForwardParams params{};
  params.batch = batch, params.seqlen_q = seqlen_q, params.seqlen_k = seqlen_k;
  params.nheads = nheads, params.nheads_kv = nheads_kv;
  params.window_left = -1, params.window_right = causal ? 0 : -1;
  params.tile = -1;
  return params;
}
