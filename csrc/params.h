// Plain structs that the host fills and the kernels read. No torch, no CUDA types.
#pragma once

#include <cstdint>

namespace flash {

// kOther is any dtype that no kernel takes.
enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kOther };

// What a kernel is compiled for. kPlain has no softcap, ALiBi or dropout; kFull has all of them.
enum class FeatureSet : uint8_t { kPlain, kFull };

// One attention forward over dense tensors. Strides are in elements; the last dimension is
// contiguous.
struct ForwardParams {
  const void* q;  // (batch, seqlen_q, nheads, headdim)
  const void* k;  // (batch, seqlen_k, nheads_kv, headdim)
  const void* v;  // (batch, seqlen_k, nheads_kv, headdim)
  void* out;      // (batch, seqlen_q, nheads, headdim)
  float* lse;     // (batch, nheads, seqlen_q), contiguous, natural log

  int64_t q_batch_stride, q_row_stride, q_head_stride;
  int64_t k_batch_stride, k_row_stride, k_head_stride;
  int64_t v_batch_stride, v_row_stride, v_head_stride;
  int64_t out_batch_stride, out_row_stride, out_head_stride;

  int batch, seqlen_q, seqlen_k, nheads, nheads_kv;

  float softmax_scale;

  // Key j is visible to query i iff i + shift - window_left <= j <= i + shift + window_right, with
  // shift = seqlen_k - seqlen_q. -1 means unbounded; causal is window_right = 0.
  int window_left, window_right;
};

}  // namespace flash
