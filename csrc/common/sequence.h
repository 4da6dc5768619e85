// Where the rows of one sequence lie. Everything that comes from the device is clamped into the
// tensors that it indexes.
#pragma once

#include "params.h"

namespace flash {

// Rows in use after an append to a sequence that had `used`; a negative one gets none.
__device__ inline int rows_after_append(int used, int seqlen_new) {
  return used < 0 ? used : static_cast<unsigned>(used) + seqlen_new;
}

struct Sequence {
  int q_batch, q_first, seqlen_q;  // queries: row q_first + i of batch entry q_batch
  int k_batch, k_first, seqlen_k;  // keys, likewise

  __device__ Sequence(const AttentionParams& params, int batch) : Sequence(whole(params, batch)) {
    take_rows_in_use(params, batch);
  }

  // With all keys that it has place for.
  __device__ static Sequence whole(const AttentionParams& params, int batch) {
    Sequence x{batch, 0, params.seqlen_q, batch, 0, params.seqlen_k};
    if (params.cu_seqlens_q != nullptr) {
      x.q_batch = 0;
      locate(params.cu_seqlens_q + batch, params.total_q, params.seqlen_q, x.q_first, x.seqlen_q);
    }
    if (params.cu_seqlens_k != nullptr) {
      x.k_batch = 0;
      locate(params.cu_seqlens_k + batch, params.total_k, params.seqlen_k, x.k_first, x.seqlen_k);
    } else if (params.cache_batch_idx != nullptr) {
      x.k_batch = clamp(params.cache_batch_idx[batch], 0, params.slots_k - 1);
    }
    return x;
  }

  // Of a whole sequence.
  // seqlen_new: of an append that seqused_k is from before
  __device__ void take_rows_in_use(const AttentionParams& params, int batch, int seqlen_new = 0) {
    const int leftpad =
        params.leftpad_k == nullptr ? 0 : clamp(params.leftpad_k[batch], 0, seqlen_k);
    if (params.seqused_k != nullptr) {
      seqlen_k = clamp(rows_after_append(params.seqused_k[batch], seqlen_new), 0, seqlen_k);
    }
    k_first += leftpad;
    seqlen_k = max(seqlen_k - leftpad, 0);
  }

  // The same, where keys may be in pages.
  __device__ Sequence(const ForwardParams& params, int batch) : Sequence(whole(params, batch)) {
    take_rows_in_use(params, batch);
  }
  __device__ void take_rows_in_use(const ForwardParams& params, int batch, int seqlen_new = 0) {
    take_rows_in_use(static_cast<const AttentionParams&>(params), batch, seqlen_new);
    if (params.lengths_k == nullptr) return;
    const unsigned begin = params.lengths_k[batch], end = params.lengths_k[batch + 1];
    const int length = max(static_cast<int>(end - begin), 0);
    seqlen_k = clamp(min(length - k_first, params.longest_k), 0, seqlen_k);
  }

 private:
  __device__ Sequence(int q_batch, int q_first, int seqlen_q, int k_batch, int k_first,
                      int seqlen_k)
      : q_batch(q_batch),
        q_first(q_first),
        seqlen_q(seqlen_q),
        k_batch(k_batch),
        k_first(k_first),
        seqlen_k(seqlen_k) {}

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
