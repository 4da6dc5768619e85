// Of csrc/ptx/atomics.h what a test needs.
#pragma once

namespace flash::ptx {

inline int add_acq_rel(int* target, int x) {
  const int before = *target;
  *target += x;
  return before;
}

}  // namespace flash::ptx
