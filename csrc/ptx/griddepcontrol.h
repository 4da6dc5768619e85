// Kernels of a stream that overlap: programmatic dependent launch.
#pragma once

namespace flash::ptx {

// Waits until the stream's kernels before this one have ended and their writes are visible. In a
// kernel that was launched without overlap it does nothing.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol"
__device__ inline void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// Lets the thread blocks of the stream's next kernel start where this one leaves room, once all of
// this kernel's have said so or ended.
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;\n");
}

}  // namespace flash::ptx
