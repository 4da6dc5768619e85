// Rows of sequences and rows of none (common/gaps.h), compiled for the host: every row is one or
// the other, and none lies outside its tensor, whatever cu_seqlens, seqused_k and leftpad_k are.
#include "common/gaps.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace flash;

std::mt19937 engine(1);
int random_from(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

// How often each row of a tensor was named.
struct RowCounts {
  const char* name;
  std::vector<int> counts;

  void add(int first, int begin, int end) {
    for (int row = first + begin; row < first + end; ++row) {
      if (row < 0 || row >= static_cast<int>(counts.size())) fail("lies outside", row);
      ++counts[row];
    }
  }
  void check(bool once) const {
    for (size_t row = 0; row < counts.size(); ++row) {
      if (once ? counts[row] != 1 : counts[row] == 0) fail("is not named once", row);
    }
  }
  void fail(const char* what, int row) const {
    std::printf("row %d of %s %s\n", row, name, what);
    std::exit(1);
  }
};

int main() {
  for (int i = 0; i < 20000; ++i) {
    AttentionParams params{};
    const bool valid = random_from(0, 2) > 0, packed_k = random_from(0, 1) == 1;
    params.batch = random_from(1, 6);
    params.seqlen_q = random_from(1, 20), params.seqlen_k = random_from(1, 20);
    params.total_q = random_from(1, 60);
    params.total_k = packed_k ? random_from(1, 60) : params.seqlen_k;
    const auto numbers = [&](int count, int most) {
      std::vector<int> result(count);
      for (int& x : result) x = valid ? random_from(0, most) : random_from(-100, 200);
      return result;
    };
    auto cu_seqlens_q = numbers(params.batch + 1, params.total_q);
    auto cu_seqlens_k = numbers(params.batch + 1, params.total_k);
    const auto seqused_k = numbers(params.batch, params.seqlen_k);
    const auto leftpad_k = numbers(params.batch, params.seqlen_k);
    if (valid) {
      std::sort(cu_seqlens_q.begin(), cu_seqlens_q.end());
      std::sort(cu_seqlens_k.begin(), cu_seqlens_k.end());
    }
    params.cu_seqlens_q = cu_seqlens_q.data();
    if (packed_k) params.cu_seqlens_k = cu_seqlens_k.data();
    if (random_from(0, 1) == 1) params.seqused_k = seqused_k.data();
    if (random_from(0, 1) == 1) params.leftpad_k = leftpad_k.data();

    const int entry_rows = packed_k ? 0 : params.total_k;  // from a batch entry of K to the next
    RowCounts queries{"q", std::vector<int>(params.total_q)};
    RowCounts keys{"k",
                   std::vector<int>(packed_k ? params.total_k : params.batch * params.total_k)};
    for (int batch = 0; batch < params.batch; ++batch) {
      const Sequence s(params, batch);
      queries.add(0, s.q_first, s.q_first + s.seqlen_q);
      keys.add(s.k_batch * entry_rows, s.k_first, s.k_first + s.seqlen_k);
    }
    for (int batch = -1; batch < params.batch; ++batch) {
      const Range gap = query_gap(params, batch);
      queries.add(0, gap.begin, gap.end);
    }
    for (int index = 0; index < 2 * params.batch; ++index) {
      const Range gap = key_gap(params, index);
      keys.add(index / 2 * entry_rows, gap.begin, gap.end);
    }
    queries.check(valid);
    keys.check(valid);
  }
}
