// How long workers take that each do one piece of work after the other. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace flash {

// So many pieces of work, each of which takes so long.
struct Work {
  int64_t count;
  float time;
};

// Pieces for each worker from which it is enough to add them up.
constexpr int kManyPieces = 6;

// When the last piece is done, if whoever is free takes the next of `all`.
inline float makespan(const std::vector<Work>& all, int workers) {
  int64_t count = 0;
  float sum = 0.f;
  for (const Work& work : all) {
    count += work.count;
    sum += work.count * work.time;
  }
  if (count <= workers) {
    const auto is_shorter = [](const Work& a, const Work& b) { return a.time < b.time; };
    return std::max_element(all.begin(), all.end(), is_shorter)->time;
  }
  if (count > int64_t{kManyPieces} * workers) return sum / workers + all.back().time / 2;
  std::map<float, int64_t> free{{0.f, workers}};  // from when on how many workers are
  float last = 0.f;
  for (const Work& work : all) {
    for (int64_t left = work.count; left > 0;) {
      const auto first = free.begin();
      const float end = first->first + work.time;
      const int64_t taken = std::min(left, first->second);
      left -= taken;
      first->second -= taken;
      if (first->second == 0) free.erase(first);
      free[end] += taken;
      last = std::max(last, end);
    }
  }
  return last;
}

}  // namespace flash
