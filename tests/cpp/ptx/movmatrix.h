// Of csrc/ptx/movmatrix.h what a test defines.
#pragma once

#include <cstdint>

namespace flash::ptx {

uint32_t transpose(uint32_t x);

}  // namespace flash::ptx
