// Device code beside unequal_parts.h.
#pragma once

#include "common/unequal_parts.h"

namespace flash {

// The block of keys that a part of a head belongs to.
__device__ inline int block_of_part(const UnequalParts& unequal, int part) {
  int block = 0;
#pragma unroll 1
  for (int step = kMostUnequalBlocks / 2; step > 0; step /= 2) {
    if (block + step < unequal.blocks && unequal.first[block + step] <= part) block += step;
  }
  return block;
}

}  // namespace flash
