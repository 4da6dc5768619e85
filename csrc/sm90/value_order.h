// The order of keys in the rows of the transposed values, where operands have 8 bits.
#pragma once

namespace flash::sm90 {

// A row of scores is an accumulator: a lane has columns 2 t, 2 t + 1 of each 8. As an operand it
// has columns 4 t .. 4 t + 3 of each 16. So that no probability moves between lanes, place 4 t + j
// of 16 is key 2 t + j (j < 2) or 8 + 2 t + j - 2.
__host__ __device__ constexpr int place_of_key(int key) {
  return (key & ~15) | (key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2);
}

}  // namespace flash::sm90
