// Of csrc/ptx/stmatrix.h what a test defines.
#pragma once

#include <cstdint>

namespace flash::ptx {

void stmatrix_x4(uint32_t shared_address, const uint32_t (&x)[4]);

}  // namespace flash::ptx
