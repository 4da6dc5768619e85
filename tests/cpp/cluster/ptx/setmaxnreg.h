// In place of csrc/ptx/setmaxnreg.h.
#pragma once

namespace flash::ptx {

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

}  // namespace flash::ptx
