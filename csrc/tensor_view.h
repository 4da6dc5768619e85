// A tensor as the kernels need it.
#pragma once

#include <array>
#include <cstdint>

#include "params.h"

namespace flash {

struct TensorView {
  static constexpr int kMaxDims = 5;

  void* data = nullptr;
  DType dtype = DType::kOther;
  int ndim = 0;
  std::array<int64_t, kMaxDims> size{};
  std::array<int64_t, kMaxDims> stride{};  // in elements
  int device = -1;                         // CUDA ordinal; -1 on the CPU
};

}  // namespace flash
