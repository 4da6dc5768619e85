// Division by a number that the host knows: a product and a shift.
#pragma once

#include <cstdint>

namespace flash {

// value: 1 or more
struct Divisor {
  int value;
  unsigned multiplier, shift;

  Divisor() = default;
  explicit Divisor(int value) : value(value), multiplier(0), shift(0) {
    while (value > 1 && int64_t{2} << shift < value) ++shift;
    multiplier = static_cast<unsigned>(((int64_t{1} << (32 + shift)) + value - 1) / value);
  }
  // x: 0 .. 2^31 - 1
  __device__ int quotient(int x) const {
    return value == 1 ? x : static_cast<int>(__umulhi(x, multiplier) >> shift);
  }
};

}  // namespace flash
