// In place of csrc/ptx/special_functions.h.
#pragma once

#include <cmath>

namespace flash::ptx {

inline float ex2(float x) { return std::exp2(x); }
inline float rcp(float x) { return 1.f / x; }

}  // namespace flash::ptx
