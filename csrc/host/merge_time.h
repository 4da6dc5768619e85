// What it costs to divide tiles into parts that another kernel merges. Host code.
#pragma once

#include <cstdint>

namespace flash {

// Microseconds that a part costs beside its steps and ends, if not all parts run at once.
constexpr float kLaterPart = 4.f;

// Microseconds of that kernel on an H200, with its launch and what parts leave for it.
// splits: parts of a tile; floats: of the parts of all
inline float merge_time(int splits, int64_t floats) {
  constexpr float kOnce = 1.9f, kEight = 0.94f, kBytes = 8e6f;  // bytes written and read in one
  return kOnce + kEight * ((splits + 7) / 8) +
         2 * sizeof(float) * static_cast<float>(floats) / kBytes;
}

}  // namespace flash
