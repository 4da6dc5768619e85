// In place of csrc/ptx/opaque.h.
#pragma once

namespace flash::ptx {

template <typename T>
T opaque(T x) {
  return x;
}

}  // namespace flash::ptx
