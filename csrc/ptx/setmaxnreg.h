// Registers that warpgroups give to each other.
#pragma once

namespace flash::ptx {

// Changes the registers of a thread, for all warps of a warpgroup, down or up to kRegisters (24 ..
// 256, a multiple of 8); up waits until others have given enough.
// PTX ISA, "Miscellaneous Instructions: setmaxnreg"
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace flash::ptx
