// Where the rows of one sequence lie. Everything that comes from the device is clamped into the
// tensors that it indexes.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash {

// Rows in use after an append to a sequence that had `used`; a negative one gets none.
__device__ inline int rows_after_append(int used, int seqlen_new) {
  return used < 0 ? used : static_cast<unsigned>(used) + seqlen_new;
}

struct Sequence {
  int q_batch, q_first, seqlen_q;  // queries: row q_first + i of batch entry q_batch
  int k_batch, k_first, seqlen_k;  // keys, likewise

  // seqlen_new: of an append that seqused_k is from before
  __device__ Sequence(const AttentionParams& params, int batch, int seqlen_new = 0)
      : q_batch(batch), q_first(0), seqlen_q(params.seqlen_q) {
    if (params.cu_seqlens_q != nullptr) {
      q_batch = 0;
      locate(params.cu_seqlens_q + batch, params.total_q, params.seqlen_q, q_first, seqlen_q);
    }
    k_batch = batch;
    k_first = 0;
    seqlen_k = params.seqlen_k;
    if (params.cu_seqlens_k != nullptr) {
      k_batch = 0;
      locate(params.cu_seqlens_k + batch, params.total_k, params.seqlen_k, k_first, seqlen_k);
    } else if (params.cache_batch_idx != nullptr) {
      k_batch = clamp(params.cache_batch_idx[batch], 0, params.slots_k - 1);
    }
    const int leftpad =
        params.leftpad_k == nullptr ? 0 : clamp(params.leftpad_k[batch], 0, seqlen_k);
    if (params.seqused_k != nullptr) {
      seqlen_k = clamp(rows_after_append(params.seqused_k[batch], seqlen_new), 0, seqlen_k);
    }
    k_first += leftpad;
    seqlen_k = max(seqlen_k - leftpad, 0);
  }

 private:
  __device__ static int clamp(int x, int low, int high) { return min(max(x, low), high); }

  __device__ static void locate(const int* bounds, int total, int longest, int& first,
                                int& length) {
    first = clamp(bounds[0], 0, total);
    length = clamp(clamp(bounds[1], 0, total) - first, 0, longest);
  }
};

// First element of a sequence's rows, for one head. (Of a signed index the compiler would keep the
// sign for the 64-bit products.)
template <typename T>
__device__ T* rows_of(const Operand& operand, unsigned batch, unsigned first, unsigned head) {
  return static_cast<T*>(operand.data) + batch * operand.batch_stride + first * operand.row_stride +
         head * operand.head_stride;
}

}  // namespace flash
