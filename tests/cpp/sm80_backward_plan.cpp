// The order of key blocks in the Ampere-class backward and their parts (sm80/backward_plan.h,
// sm80/key_block.h), on a GPU of 132 SMs: of each shape it reads and prints the parts of each
// block, of a head. Thread blocks name each part of each key block once, those of the first keys
// first, and parts have places of their own; else it says what is wrong.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <tuple>

#include "h200_on_host.h"

// Named by code that does not run here.
struct {
  unsigned x;
} threadIdx;
using std::max, std::min;
int __popc(unsigned) { return 0; }
unsigned __ballot_sync(unsigned, bool) { return 0; }
inline unsigned __umulhi(unsigned x, unsigned y) { return uint64_t{x} * y >> 32; }

#include "sm80/backward_plan.h"

using namespace flash;
using namespace flash::sm80;

int main() {
  int batch, seqlen_q, seqlen_k, nheads, nheads_kv, causal, deterministic, block_m, block_n;
  while (std::scanf("%d %d %d %d %d %d %d %d %d", &batch, &seqlen_q, &seqlen_k, &nheads, &nheads_kv,
                    &causal, &deterministic, &block_m, &block_n) == 9) {
    BackwardParams params{};
    static_cast<AttentionParams&>(params) =
        dense_forward(batch, seqlen_q, seqlen_k, nheads, nheads_kv, causal);
    params.deterministic = deterministic;
    const SequenceTiles tiles = key_tiles(params, block_n);
    const KeyBlockOrder order = plan_key_blocks(params, block_m, block_n, 1024, 132);
    const int blocks = (seqlen_k + block_n - 1) / block_n;

    std::set<std::tuple<int, int, int, int>> parts;
    std::set<int> places;
    const auto expect = [](bool holds, const char* what, int index) {
      if (!holds) std::printf("thread block %d: %s\n", index, what);
    };
    for (int i = 0; i < count_parts(params, tiles, order); ++i) {
      const KeyBlock block(params, tiles, order, i);
      expect(block.batch < batch && block.head_kv < nheads_kv && block.n_block < blocks &&
                 block.part >= 0 && block.part < block.parts,
             "no such part", i);
      expect(parts.emplace(block.batch, block.head_kv, block.n_block, block.part).second, "twice",
             i);
      const int place = block.first_part + block.part;
      expect(place < count_parts(params, tiles, order) && places.insert(place).second,
             "another's place", i);
      expect(block.n_block == 0 || parts.count({block.batch, block.head_kv, block.n_block - 1, 0}),
             "before the keys in front of it", i);
    }
    for (int n = 0; n < blocks; ++n) {
      int of_block = 0;
      for (const auto& [of_batch, head, block, part] : parts) {
        of_block += of_batch == 0 && head == 0 && block == n;
      }
      std::printf("%d%c", of_block, n + 1 < blocks ? ' ' : '\n');
    }
  }
}
