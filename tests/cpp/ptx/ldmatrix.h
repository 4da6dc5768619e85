// Of csrc/ptx/ldmatrix.h what a test defines.
#pragma once

#include <cstdint>

namespace flash::ptx {

void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared_address);
void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared_address);

}  // namespace flash::ptx
