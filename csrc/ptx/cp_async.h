// Asynchronous copies from global to shared memory that bypass the registers.
#pragma once

#include <cstdint>

namespace flash::ptx {

// Copies 16 bytes; where `valid` is false it writes 16 zero bytes and does not read `global`.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async" (.cg, src-size)
__device__ inline void cp_async_16_zfill(uint32_t shared_address, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes, through the L1 cache.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async" (.ca, src-size)
__device__ inline void cp_async_4_zfill(uint32_t shared_address, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
               : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.wait_all": waits for this thread's
// copies; other threads see them after a barrier.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// Makes a group of this thread's copies since the last one.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.commit_group"
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Arrives at a barrier of this thread block when this thread's copies so far have arrived; counts
// among the arrivals that the barrier was initialised with.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.mbarrier.arrive" (.noinc)
__device__ inline void cp_async_arrive(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(&barrier)))
               : "memory");
}

// Waits for all of this thread's groups but the last kPending.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.wait_group"
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flash::ptx
