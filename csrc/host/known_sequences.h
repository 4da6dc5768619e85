// What the host knows of the sequences of a call, to predict how long a kernel takes. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "params.h"

namespace flash {

// So many sequences of the same lengths.
class KnownSequences {
 public:
  KnownSequences(const AttentionParams& params, int64_t count, int64_t queries, int64_t keys)
      : count_(count),
        queries_(queries),
        keys_(keys),
        window_left_(params.window_left),
        window_right_(params.window_right) {}

  int64_t count() const { return count_; }
  int64_t queries() const { return queries_; }
  int64_t keys() const { return keys_; }

  // Steps over blocks of block_n keys: from the first key that query `begin` sees to the last that
  // query end - 1 sees, or the last query.
  int64_t steps(int64_t begin, int64_t end, int block_n) const {
    const int64_t shift = keys_ - queries_, last = std::min(end, queries_) - 1 + shift;
    const int64_t first_key =
        window_left_ < 0 ? 0 : std::max<int64_t>(begin + shift - window_left_, 0);
    const int64_t end_key = window_right_ < 0 ? keys_ : std::min(keys_, last + window_right_ + 1);
    return first_key < end_key ? (end_key - 1) / block_n - first_key / block_n + 1 : 0;
  }

  // Steps over blocks of block_m queries: from the first query that sees key `begin` to the last
  // that sees key end - 1.
  int64_t query_steps(int64_t begin, int64_t end, int block_m) const {
    const int64_t shift = keys_ - queries_;
    const int64_t first_query =
        window_right_ < 0 ? 0 : std::max<int64_t>(begin - shift - window_right_, 0);
    const int64_t end_query =
        window_left_ < 0 ? queries_ : std::min(queries_, end - shift + window_left_);
    return first_query < end_query ? (end_query - 1) / block_m - first_query / block_m + 1 : 0;
  }

 private:
  int64_t count_, queries_, keys_;
  int window_left_, window_right_;
};

// Of packed sequences, whose lengths are on the device, it knows the sum and the longest: as if
// they were spread evenly around the mean, up to the longest or down to nothing, whichever is
// nearer.
inline std::vector<KnownSequences> known_sequences(const AttentionParams& params) {
  constexpr int kKinds = 4;
  const int kinds = params.cu_seqlens_q == nullptr || params.batch < kKinds ? 1 : kKinds;
  const auto length = [&](const int* cu_seqlens, int total, int longest, int kind) {
    if (cu_seqlens == nullptr) return int64_t{longest};
    const int64_t mean = std::min((total - 1) / params.batch + 1, longest);
    const int64_t spread = std::min<int64_t>(mean, longest - mean);
    return std::max<int64_t>(mean + spread * (2 * kind + 1 - kinds) / kinds, 1);
  };
  std::vector<KnownSequences> all;
  for (int kind = 0; kind < kinds; ++kind) {
    all.emplace_back(params, params.batch / kinds,
                     length(params.cu_seqlens_q, params.total_q, params.seqlen_q, kind),
                     length(params.cu_seqlens_k, params.total_k, params.seqlen_k, kind));
  }
  return all;
}

}  // namespace flash
