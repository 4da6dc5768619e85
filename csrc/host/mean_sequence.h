// What the host knows of the sequences of a call, to predict how long a kernel takes. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace flash {

// A sequence of dense ones; of packed ones, whose lengths are on the device, one of the mean
// length.
class MeanSequence {
 public:
  explicit MeanSequence(const AttentionParams& params)
      : queries_(mean(params, params.cu_seqlens_q, params.total_q, params.seqlen_q)),
        keys_(mean(params, params.cu_seqlens_k, params.total_k, params.seqlen_k)),
        window_left_(params.window_left),
        window_right_(params.window_right) {}

  int64_t queries() const { return queries_; }

  // Steps over blocks of block_n keys: from the first key that query `begin` sees to the last that
  // query end - 1 sees, or the last query.
  int64_t steps(int64_t begin, int64_t end, int block_n) const {
    const int64_t shift = keys_ - queries_, last = std::min(end, queries_) - 1 + shift;
    const int64_t first_key =
        window_left_ < 0 ? 0 : std::max<int64_t>(begin + shift - window_left_, 0);
    const int64_t end_key = window_right_ < 0 ? keys_ : std::min(keys_, last + window_right_ + 1);
    return first_key < end_key ? (end_key - 1) / block_n - first_key / block_n + 1 : 0;
  }

 private:
  static int64_t mean(const AttentionParams& params, const int* cu_seqlens, int total,
                      int longest) {
    return cu_seqlens == nullptr ? longest : std::min((total - 1) / params.batch + 1, longest);
  }

  int64_t queries_, keys_;
  int window_left_, window_right_;
};

}  // namespace flash
