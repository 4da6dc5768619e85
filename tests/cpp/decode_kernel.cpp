// The decode kernel of Hopper on the host (cluster_on_host.h): small random problems, with threads
// in random order, beside attention in double precision. It reads how many of each kernel.
#include "cluster_on_host.h"
// Behind it:
#include "decode/decode_kernel.cuh"

using namespace flash;
using namespace flash::decode;

using T = __nv_bfloat16;

int between(int low, int high) { return low + static_cast<int>(host::below(high - low + 1)); }
bool one_of(int n) { return host::below(n) == 0; }
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(host::engine);
}
template <typename Number>
std::vector<Number> random_numbers(size_t count, float scale) {
  std::vector<Number> x(count);
  for (Number& each : x) each = static_cast<Number>(scale * normal());
  return x;
}

// A tensor (batch, rows, heads, dim).
struct Tensor {
  int rows, heads, dim;
  std::vector<T> data;

  Tensor(int batch, int rows, int heads, int dim, float scale)
      : rows(rows),
        heads(heads),
        dim(dim),
        data(random_numbers<T>(size_t{1} * batch * rows * heads * dim, scale)) {}
  Operand operand() {
    return {data.data(), int64_t{1} * rows * heads * dim, int64_t{1} * heads * dim, dim};
  }
  double at(int batch, int row, int head, int col) const {
    return static_cast<float>(data[((size_t{1} * batch * rows + row) * heads + head) * dim + col]);
  }
};

struct Problem {
  bool full;  // whether softcap, ALiBi and padding may be asked for
  int batch, seqlen_q, group, heads_kv, heads;
  int page_size, pages, capacity;  // pages of a sequence, keys it has place for
  int left, right;                 // window; -1: unbounded
  int seqlen_new;
  bool has_sinks, has_alibi, has_lengths;
  float softcap;
  std::vector<int> table, used, before, leftpad, slots;
  std::vector<float> sinks, slopes, lse;
  Tensor q, k, v, out;

  template <typename Config>
  static Problem random(bool full, bool laps) {
    const int batch = between(1, 2), heads_kv = one_of(4) ? 2 : 1;
    const int group = one_of(3) ? 1 << between(0, 4) : between(1, 16);
    const int seqlen_q = between(1, max(1, min(12, Config::kRows * 3 / 2 / group)));
    const int steps = laps ? between(8, 12) : between(1, 6);
    const int longest = Config::kStepKeys * steps + between(-5, 5);
    const int page_size = one_of(2) ? 0 : one_of(2) ? 16 : between(1, 40);
    const int pages = page_size == 0 ? 0 : (longest + page_size - 1) / page_size;
    const int capacity = page_size == 0 ? longest : pages * page_size;
    const int slots = page_size == 0 ? batch : pages * batch;
    const int rows = page_size == 0 ? capacity : page_size;
    const int heads = group * heads_kv, headdim = Config::kHeadDim, headdim_v = Config::kHeadDimV;
    Problem x{full,
              batch,
              seqlen_q,
              group,
              heads_kv,
              heads,
              page_size,
              pages,
              capacity,
              !laps && one_of(3) ? between(0, capacity) : -1,
              one_of(2) ? 0 : -1,
              one_of(3) ? between(1, 12) : 0,
              one_of(4),
              full && one_of(3),
              true,
              full && one_of(3) ? 3.f : 0.f,
              std::vector<int>(batch * pages),
              std::vector<int>(batch),
              std::vector<int>(batch),
              std::vector<int>(batch, 0),
              std::vector<int>(batch),
              random_numbers<float>(heads, 1.f),
              random_numbers<float>(heads, 0.1f),
              std::vector<float>(batch * heads * seqlen_q, NAN),
              Tensor(batch, seqlen_q, heads, headdim, one_of(2) ? 1.f : 3.f),
              Tensor(slots, rows, heads_kv, headdim, 1.f),
              Tensor(slots, rows, heads_kv, headdim_v, 1.f),
              Tensor(batch, seqlen_q, heads, headdim_v, NAN)};
    for (float& slope : x.slopes) slope = std::abs(slope);
    for (size_t i = 0; i < x.table.size(); ++i) x.table[i] = static_cast<int>(i);
    std::shuffle(x.table.begin(), x.table.end(), host::engine);
    for (int b = 0; b < batch; ++b) {
      const int used = one_of(6) ? 0 : one_of(4) ? between(0, 20) : between(capacity / 2, capacity);
      x.slots[b] = b;
      x.used[b] = laps || one_of(4) ? capacity : max(used, x.seqlen_new);
      x.before[b] = x.used[b] - x.seqlen_new;
      if (full && !laps && x.seqlen_new == 0 && one_of(3)) x.leftpad[b] = between(0, x.used[b]);
    }
    if (page_size == 0 && x.seqlen_new == 0 && one_of(4)) {
      std::shuffle(x.slots.begin(), x.slots.end(), host::engine);
    }
    return x;
  }

  ForwardParams params() {
    ForwardParams x{};
    x.q = q.operand(), x.k = k.operand(), x.v = v.operand(), x.out = out.operand();
    x.lse = lse.data(), x.lse_batch_stride = heads * seqlen_q, x.lse_head_stride = seqlen_q;
    x.batch = batch, x.nheads = heads, x.nheads_kv = heads_kv;
    x.seqlen_q = seqlen_q, x.seqlen_k = capacity, x.headdim = q.dim, x.headdim_v = v.dim;
    x.slots_k = page_size == 0 ? batch : pages * batch;
    x.aligned = true;
    x.softmax_scale = scale();
    x.softcap = softcap;
    x.seqused_k = seqlen_new > 0 ? before.data() : used.data();
    x.seqlen_new = seqlen_new;
    if (is_padded()) x.leftpad_k = leftpad.data();
    if (is_shuffled()) x.cache_batch_idx = slots.data();
    if (has_sinks) x.s_aux = sinks.data();
    if (has_alibi) x.alibi_slopes = slopes.data();
    x.window_left = left < 0 ? capacity : left;
    x.window_right = right < 0 ? capacity : right;
    x.page_size = page_size;
    if (page_size > 0) x.block_table = table.data(), x.block_table_stride = pages;
    return x;
  }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(q.dim)); }
  bool is_padded() const { return *std::max_element(leftpad.begin(), leftpad.end()) > 0; }
  bool is_shuffled() const { return slots[0] != 0; }

  // Whether out and lse are right.
  bool check() const {
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < seqlen_q; ++i) {
          if (!check_row(b, h, i)) return false;
        }
      }
    }
    return true;
  }

 private:
  bool check_row(int b, int h, int i) const {
    const int keys = used[b] - leftpad[b], head_kv = h / group, shift = keys - seqlen_q;
    const auto place = [&](int key) {
      const int row = key + leftpad[b];
      return page_size == 0 ? std::pair(slots[b], row)
                            : std::pair(table[b * pages + row / page_size], row % page_size);
    };
    std::vector<double> scores(keys, -INFINITY);
    double most = has_sinks ? sinks[h] : -INFINITY;
    for (int j = 0; j < keys; ++j) {
      if ((left >= 0 && j < i + shift - left) || (right >= 0 && j > i + shift + right)) continue;
      const auto [slot, row] = place(j);
      double x = 0;
      for (int d = 0; d < q.dim; ++d) x += q.at(b, i, h, d) * k.at(slot, row, head_kv, d);
      x *= scale();
      if (softcap > 0.f) x = softcap * std::tanh(x / softcap);
      if (has_alibi) x -= slopes[h] * std::abs(j - i - shift);
      scores[j] = x, most = max(most, x);
    }
    double sum = has_sinks ? std::exp(sinks[h] - most) : 0;
    std::vector<double> expected(v.dim, 0.);
    for (int j = 0; j < keys; ++j) {
      if (scores[j] == -INFINITY) continue;
      const double p = std::exp(scores[j] - most);
      const auto [slot, row] = place(j);
      sum += p;
      for (int d = 0; d < v.dim; ++d) expected[d] += p * v.at(slot, row, head_kv, d);
    }
    for (int d = 0; d < v.dim; ++d) {
      const double x = sum > 0 ? expected[d] / sum : 0, found = out.at(b, i, h, d);
      if (!(std::abs(found - x) <= 0.02 * (1 + std::abs(x)))) return false;
    }
    const double x = sum > 0 ? most + std::log(sum) : -INFINITY;
    const double found = lse[(b * heads + h) * seqlen_q + i];
    return found == x || std::abs(found - x) < 0.01;
  }
};

// As decode_launch.cuh has it, with any clusters, and any number of parts unless rings are to have
// several laps.
template <typename Config>
DecodeSchedule random_schedule(const Problem& problem, int tiles, int tile_rows, bool laps) {
  DecodeSchedule x{};
  x.splits = laps ? 1 : between(1, 12);
  x.cluster = between(1, min(x.splits, 6));
  const auto slice = [&] { return (tile_rows + x.cluster - 1) / x.cluster; };
  while (x.cluster > 1 && slice() * x.cluster > Config::kReceivedRows) --x.cluster;
  x.clusters = (x.splits + x.cluster - 1) / x.cluster;
  x.cluster_reciprocal = (1 << 16) / x.cluster + 1;
  x.slice_rows = slice();
  x.group = Divisor(problem.group);
  x.row_tiles = Divisor(tiles);
  x.rows = tile_rows;
  x.page_size = Divisor(std::max(problem.page_size, 1));
  x.starts_early = (problem.left < 0 || problem.left >= problem.capacity) &&
                   problem.seqlen_new == 0 && !problem.is_padded() && !problem.is_shuffled();
  return x;
}

template <typename Config>
void check_one(unsigned seed) {
  host::engine.seed(seed);
  const bool laps = one_of(4);
  Problem problem = Problem::random<Config>(Config::kFeatures == FeatureSet::kFull, laps);
  ForwardParams params = problem.params();
  const int rows = problem.seqlen_q * problem.group;
  const int tiles = (rows + Config::kRows - 1) / Config::kRows;
  const int tile_rows = min(rows, Config::kRows), heads = problem.heads_kv * tiles;
  const DecodeSchedule schedule = random_schedule<Config>(problem, tiles, tile_rows, laps);
  const size_t stored = size_t{1} * heads * problem.batch * schedule.clusters * tile_rows;
  std::vector<float> partial_out(stored * Config::kHeadDimV, NAN), partial_rows(stored * 2, NAN);
  std::vector<int> counters(heads * problem.batch * schedule.cluster, 0);
  params.partial_out = partial_out.data(), params.partial_rows = partial_rows.data();
  params.counters = counters.data();
  const float scale_log2 = scale_log2_of(params);
  host::body = [&] {
    auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(host::current->block->memory);
    attend<Config>(params, schedule, blockIdx.z, scale_log2, shared, threadIdx.x / 32,
                   threadIdx.x % 32);
  };
  gridDim = {static_cast<unsigned>(heads), 0, static_cast<unsigned>(problem.batch)};
  std::vector<std::vector<Indices>> clusters;
  for (unsigned i = 0; i < gridDim.x * gridDim.z * schedule.clusters; ++i) {
    const unsigned tile = i / schedule.clusters, first = i % schedule.clusters * schedule.cluster;
    std::vector<Indices> blocks;
    for (int rank = 0; rank < schedule.cluster; ++rank) {
      blocks.push_back({tile % gridDim.x, first + rank, tile / gridDim.x});
    }
    clusters.push_back(blocks);
  }
  std::shuffle(clusters.begin(), clusters.end(), host::engine);
  for (const auto& blocks : clusters) host::run_cluster(Config::kThreads, blocks);
  const bool counted = std::all_of(counters.begin(), counters.end(), [](int x) { return x == 0; });
  if (counted && problem.check()) return;
  host::fail("head dim " + std::to_string(Config::kHeadDim) + ", seed " + std::to_string(seed) +
             (counted ? ": wrong" : ": counters are not zero"));
}

template <int kHeadDim, int kHeadDimV, FeatureSet kFeatures, int kRows>
void check(unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    const unsigned seed = 1000 * (kHeadDim + kRows) + i;
    check_one<DecodeConfig<T, T, kHeadDim, kHeadDimV, kFeatures, kRows, true>>(seed);
  }
}

int main() {
  unsigned count;
  if (std::scanf("%u", &count) != 1) return 1;
  check<64, 64, FeatureSet::kFull, 64>(count);
  check<128, 128, FeatureSet::kPlain, 64>(count);
  check<192, 128, FeatureSet::kPlain, 64>(count);
  check<256, 256, FeatureSet::kFull, 64>(count);
  check<128, 128, FeatureSet::kFull, 16>(count);
}
