// Mask, score transform and dropout of tiles whose rows are queries (S) and of those whose rows are
// keys (S^T), compiled for the host: each element must be what (query, key) says.
//
// The lanes of a warp run one after the other, twice: what others gave to a transposition in the
// first run, a lane receives in the second, whose results are checked.
//
// Standard input: for each case rng_state, dropout_p, seqlen_q, seqlen_k, windows, then the
// mask (seqlen_q, seqlen_k) of flash_attn/_backends/philox.py as 0 and 1.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/dropout.h"
#include "common/fragment.h"
#include "common/mask.h"
#include "common/scores.h"

using namespace flash;

constexpr int kRowTiles = 2;

bool first_run;
int this_lane;
std::vector<uint32_t> given[32];  // to transpositions, by lane
size_t transpositions;            // of this lane so far

uint32_t flash::ptx::transpose(uint32_t x) {
  if (first_run) {
    given[this_lane].push_back(x);
    return x;
  }
  // A lane holds two neighbours of a row of 8, and receives two of a column.
  uint32_t received = 0;
  for (int i = 0; i < 2; ++i) {
    const int row = this_lane % 4 * 2 + i, column = this_lane / 4;
    const uint32_t pair = given[row * 4 + column / 2][transpositions];
    received |= (pair >> column % 2 * 16 & 0xffff) << i * 16;
  }
  ++transpositions;
  return received;
}

struct Case {
  AttentionParams params;
  Mask mask;
  int seqlen_q;
  bool kept[256][256];

  bool visible(int query, int key) const {
    const int position = query + mask.shift;
    return key < mask.seqlen_k && key >= position - mask.window_left &&
           key <= position + mask.window_right;
  }
};

void check(bool right, const char* what, int query, int key) {
  if (right) return;
  std::printf("%s of query %d and key %d is wrong\n", what, query, key);
  std::exit(1);
}

// What a forward keeps of the pairs of the first 16 x 16 block.
void check_kept(const Case& c, const Dropout& dropout, int query_begin, int key_begin, int lane) {
  const auto dropped = dropout.dropped(query_begin / 16, key_begin / 16, lane);
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = dropped.keep(0x12345678, i / 2, i % 2 * 2);
    const int query = query_begin + lane / 4 + i % 2 * 8;
    for (int half = 0; half < 2; ++half) {
      const int key = key_begin + lane % 4 * 2 + i / 2 * 8 + half;
      if (query >= c.seqlen_q || key >= c.mask.seqlen_k) continue;
      const uint32_t wanted = c.kept[query][key] ? half == 0 ? 0x5678 : 0x1234 : 0;
      check((pair >> 16 * half & 0xffff) == wanted, "pair", query, key);
    }
  }
}

// One warp's tile from (query_begin, key_begin) on, multiples of 16.
template <Rows kRows, int kColTiles>
void check_tile(const Case& c, int query_begin, int key_begin, int lane) {
  using Fragment = float[kRowTiles][kColTiles][4];
  // ptx/mma_sync.h: lane 4 * g + t has rows g, g + 8 and columns 2 * t, 2 * t + 1.
  const auto query_and_key = [&](int m, int n, int j) {
    const int row = 16 * m + lane / 4 + (j >= 2 ? 8 : 0), col = 8 * n + lane % 4 * 2 + (j & 1);
    return kRows == Rows::kQueries ? Place{query_begin + row, key_begin + col}
                                   : Place{query_begin + col, key_begin + row};
  };
  const Place first = place_of<kRows>(lane / 4, lane % 4 * 2);  // of the lane's scores
  const int query = query_begin + first.query, key = key_begin + first.key;
  const auto apply_mask_to = [&](Fragment& scores) {
    const bool rows_are_queries = kRows == Rows::kQueries;
    const auto row_of = [&](int m, int half) {
      return (rows_are_queries ? query : key) + m * 16 + half * 8;
    };
    apply_mask<kRows>(scores, c.mask, row_of, rows_are_queries ? key : query);
  };

  Fragment scores, transformed, slopes;
  for_each(scores, [](float& score, int m, int n, int j) { score = .1f * (m - n + j); });
  for_each(transformed, [&](float& score, int m, int n, int j) { score = scores[m][n][j]; });
  const ScoreTransform transform(c.params, 0, 0, c.mask.shift);
  transform.apply<kRows>(
      transformed, query, key, [&] { apply_mask_to(transformed); },
      [&](int m, int n, int j, float slope) { slopes[m][n][j] = slope; });
  apply_mask_to(transformed);
  const Dropout dropout(c.params, 0, 0);
  if constexpr (kRows == Rows::kQueries) check_kept(c, dropout, query_begin, key_begin, lane);
  Fragment marked;
  for_each(marked, [](float& p, int m, int n, int j) { p = .01f * (m + n + j); });
  mark_dropped<kRows>(marked, dropout, query_begin / 16, key_begin / 16, lane);
  if (first_run) return;
  for_each(transformed, [&](float& result, int m, int n, int j) {
    const auto [i, k] = query_and_key(m, n, j);
    check(c.visible(i, k) == (result != -INFINITY), "visibility", i, k);
    if (c.visible(i, k)) {
      const float capped = std::tanh(scores[m][n][j] * c.params.softmax_scale / c.params.softcap);
      const float bias = transform.slope * std::abs(static_cast<float>(i + c.mask.shift - k));
      check(std::abs(result - (capped - bias)) < 1e-4f * (1.f + bias), "score", i, k);
      check(std::abs(slopes[m][n][j] - (1.f - capped * capped)) < 1e-5f, "slope", i, k);
    }
    if (i < c.seqlen_q && k < c.mask.seqlen_k) {
      const bool kept = c.kept[i][k];
      const float p = marked[m][n][j], of_kept = .01f * (m + n + j);
      check(p == (kept ? of_kept : -of_kept) && signbit(p) == !kept, "dropout", i, k);
      const float gradient = of_kept * ((kept ? 3.f : 0.f) - 2.f);
      check(std::abs(gradient_of_marked(p, 3.f, 2.f) - gradient) < 1e-5f, "gradient", i, k);
    }
  });
}

template <Rows kRows, int kColTiles>
void check_tiles(const Case& c) {
  constexpr int kTileRows = kRowTiles * 16, kTileCols = kColTiles * 8;
  constexpr Place kTile = place_of<kRows>(kTileRows, kTileCols);
  for (int query = 0; query < c.seqlen_q; query += kTile.query) {
    for (int key = 0; key < c.mask.seqlen_k; key += kTile.key) {
      for (std::vector<uint32_t>& of_lane : given) of_lane.clear();
      for (const bool first : {true, false}) {
        first_run = first;
        for (this_lane = 0; this_lane < 32; ++this_lane) {
          transpositions = 0;
          check_tile<kRows, kColTiles>(c, query, key, this_lane);
        }
      }
    }
  }
}

// A block of queries and one of keys name each other, and do so if one sees something of the other.
void check_blocks(const Case& c) {
  constexpr int kBlockM = 16, kBlockN = 32;
  for (int m = 0; m * kBlockM < c.seqlen_q; ++m) {
    const int last = std::min((m + 1) * kBlockM, c.seqlen_q);
    const Range keys = key_blocks<kBlockN>(c.mask, m * kBlockM, last);
    for (int n = 0; n * kBlockN < c.mask.seqlen_k; ++n) {
      const Range queries =
          query_blocks<kBlockM>(c.mask, c.seqlen_q, n * kBlockN, (n + 1) * kBlockN);
      const bool named = n >= keys.begin && n < keys.end;
      bool seen = false;
      for (int i = m * kBlockM; i < last; ++i) {
        for (int k = n * kBlockN; k < (n + 1) * kBlockN; ++k) seen |= c.visible(i, k);
      }
      check(named == (m >= queries.begin && m < queries.end) && named >= seen, "block", m, n);
    }
  }
}

int main() {
  static Case c;
  int64_t rng_state[2];
  double dropout_p;
  const float alibi_slope = .25f;
  int cases = 0;
  while (std::scanf("%ld %ld %lf %d %d %d %d", &rng_state[0], &rng_state[1], &dropout_p,
                    &c.seqlen_q, &c.mask.seqlen_k, &c.mask.window_left,
                    &c.mask.window_right) == 7) {
    c.mask.shift = c.mask.seqlen_k - c.seqlen_q;
    for (int i = 0; i < c.seqlen_q; ++i) {
      for (int k = 0; k < c.mask.seqlen_k; ++k) {
        int kept;
        if (std::scanf("%d", &kept) != 1) return 2;
        c.kept[i][k] = kept != 0;
      }
    }
    c.params.nheads = 1;
    c.params.softmax_scale = .5f;
    c.params.softcap = 2.f;
    c.params.alibi_slopes = &alibi_slope;
    c.params.rng_state = rng_state;
    c.params.dropout_threshold = DropoutThreshold::of(dropout_p);
    check_blocks(c);
    check_tiles<Rows::kQueries, 4>(c);
    check_tiles<Rows::kKeys, 4>(c);
    check_tiles<Rows::kQueries, 16>(c);
    check_tiles<Rows::kKeys, 16>(c);
    ++cases;
  }
  std::printf("%d cases\n", cases);
}
