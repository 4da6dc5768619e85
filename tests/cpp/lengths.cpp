// Keys of sequences in pages (common/sequence.h), compiled for the host: how many each one has.
// Reads batch, rows of the table, longest; whether there are seqused_k and leftpad_k; then
// lengths_k (batch + 1), seqused_k (batch), leftpad_k (batch).
#include <cstdio>
#include <vector>

#include "common/sequence.h"

using namespace flash;

int read() {
  int x = 0;
  if (std::scanf("%d", &x) != 1) std::printf("a number is missing\n");
  return x;
}

std::vector<int> read_many(int count) {
  std::vector<int> all(count);
  for (int& x : all) x = read();
  return all;
}

int main() {
  ForwardParams params{};
  params.batch = read(), params.seqlen_k = read(), params.longest_k = read();
  const bool has_used = read(), has_leftpad = read();
  const std::vector<int> lengths = read_many(params.batch + 1);
  const std::vector<int> used = read_many(params.batch), leftpad = read_many(params.batch);
  params.lengths_k = lengths.data();
  if (has_used) params.seqused_k = used.data();
  if (has_leftpad) params.leftpad_k = leftpad.data();
  for (int batch = 0; batch < params.batch; ++batch) {
    std::printf("%d ", Sequence(params, batch).seqlen_k);
  }
}
