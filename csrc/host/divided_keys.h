// Into how many parts, which another kernel merges, the keys of tiles may be divided, and what that
// costs. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flash {

// Times that as many parts as run at once may follow each other.
constexpr int kMostRounds = 6;
// Microseconds that a part costs beside its steps and ends, if there are several rounds.
constexpr float kLaterPart = 4.f;

// Microseconds of the other kernel on an H200, with its launch and what parts leave for it.
// splits: parts of a tile; floats: of the parts of all
inline float merge_time(int splits, int64_t floats) {
  constexpr float kOnce = 1.9f, kEight = 0.94f, kBytes = 8e6f;  // bytes written and read in one
  return kOnce + kEight * ((splits + 7) / 8) +
         2 * sizeof(float) * static_cast<float>(floats) / kBytes;
}

// The numbers of parts of a tile, from 2 to `most`, that are worth trying: those of one round, and
// of more rounds those whose last is nearly full.
// slots: parts that run at once
inline std::vector<int> likely_splits(int64_t tiles, int64_t slots, int64_t most) {
  std::vector<int> found;
  for (int64_t splits = 2; splits <= std::min(slots / tiles, most); ++splits) {
    found.push_back(static_cast<int>(splits));
  }
  for (int rounds = 2; rounds <= kMostRounds; ++rounds) {
    const int64_t splits = rounds * slots / tiles;
    if (splits > 1 && splits <= most) found.push_back(static_cast<int>(splits));
  }
  return found;
}

}  // namespace flash
