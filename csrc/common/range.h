// Ranges of rows, keys, queries or blocks of them.
#pragma once

namespace flash {

// begin .. end - 1; empty if begin >= end.
struct Range {
  int begin, end;

  __device__ bool empty() const { return begin >= end; }
};

}  // namespace flash
