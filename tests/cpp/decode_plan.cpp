// The plan of a decode kernel (decode/decode_plan.h) on an H200: of each shape it reads, with the
// number of parts that is given or 0, rows of a tile, parts and the size of a cluster.
#include "decode/decode_plan.h"

#include <algorithm>
#include <cstdio>

using namespace flash;
using namespace flash::decode;

// Thread blocks of the kernels of heads of 128, in 16 bits, that run at a time, by the size of
// their clusters: by twos on an SM, and alone.
constexpr int kByTwos[] = {264, 264, 237, 248, 235, 234, 224, 240,
                           207, 210, 176, 192, 182, 196, 210, 224};
constexpr int kAlone[] = {132, 132, 117, 120, 110, 102, 105, 120, 81, 70, 77, 84, 91, 98, 105, 112};

int main() {
  int batch, seqlen_k, nheads, nheads_kv, seqlen_q, num_splits;
  while (std::scanf("%d %d %d %d %d %d", &batch, &seqlen_k, &nheads, &nheads_kv, &seqlen_q,
                    &num_splits) == 6) {
    ForwardParams params{};
    params.num_splits = num_splits;
    params.batch = batch;
    params.seqlen_q = seqlen_q;
    params.seqlen_k = seqlen_k;
    params.window_left = -1;
    const int rows = seqlen_q * (nheads / nheads_kv);
    int best_rows = 0;
    DecodePlan best{1, 1};
    for (const int tile_rows : {16, 64}) {
      if (tile_rows == 64 && rows <= 16) continue;
      const auto slots_of = [&](int cluster, bool alone) {
        return (alone || tile_rows == 64 ? kAlone : kByTwos)[cluster - 1];
      };
      DecodeWork work{};
      work.same_keys = (rows + tile_rows - 1) / tile_rows;
      work.tiles = int64_t{batch} * nheads_kv * work.same_keys;
      work.tile_rows = tile_rows;
      work.rows = std::min(rows, tile_rows);
      work.rows_of_threads = tile_rows == 64 ? 12 : 4;
      work.step_keys = 64;
      work.step_bytes = 64 * 2 * 128 * 2;
      work.most_splits = 256;
      work.most_cluster = 16;
      work.received_rows = tile_rows == 64 ? 80 : 24;
      work.counted = true;
      work.sms = 132;
      const DecodePlan plan = plan_decode(params, work, slots_of);
      if (plan.time <= best.time) best = plan, best_rows = tile_rows;
    }
    std::printf("%d:%d:%d\n", best_rows, best.splits, best.cluster);
  }
}
