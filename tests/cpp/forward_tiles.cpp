// Prints the tile shapes of sm90's plain forward: head dim, head dim of v, number, queries, keys.
#include <cstdio>

#include "sm90/forward_tile.h"

using namespace flash;

int main() {
  const int headdims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 192}, {192, 128}, {256, 256}};
  for (const auto& [d, dv] : headdims) {
    for (int i = 0; i < sm90::count_forward_tiles(d, dv, FeatureSet::kPlain); ++i) {
      const sm90::ForwardTile tile = sm90::forward_tile(d, dv, FeatureSet::kPlain, i);
      std::printf("%d %d %d %dx%d\n", d, dv, i, tile.block_m, tile.block_n);
    }
  }
}
