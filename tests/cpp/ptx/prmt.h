// In place of csrc/ptx/prmt.h.
#pragma once

#include "byte_perm.h"

namespace flash::ptx {

inline uint32_t spread_signs(uint32_t x, uint32_t selector) { return prmt(x, 0, selector); }

}  // namespace flash::ptx
