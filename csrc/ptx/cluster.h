// Thread block clusters: neighbouring thread blocks that reach each other's shared memory.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace flash::ptx {

// Of this thread block in its cluster.
__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// All threads of a cluster wait until all have arrived; what they wrote before is then visible.
// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster"
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive;\n" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;\n" ::: "memory"); }
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Orders nothing but the barriers that its threads have initialised (fence_barrier_init): what is
// written in between is not visible behind the wait.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
}

// The same variable in the shared memory of another thread block of the cluster.
// PTX ISA, "Data Movement and Conversion Instructions: mapa"
template <typename T>
__device__ T* map_to_rank(T* x, int rank) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;\n" : "=l"(mapped) : "l"(x), "r"(rank));
  return mapped;
}

// Arrives at a barrier of any thread block of the cluster. It orders what asynchronous instructions
// have read, which is over; a release for the whole cluster would be a memory barrier.
// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.arrive"
__device__ inline void arrive_in_cluster(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// Writes 16 bytes to the shared memory of any thread block of the cluster; they arrive at its
// barrier. Both addresses are from map_to_rank.
// PTX ISA, "Data Movement and Conversion Instructions: st.async"
__device__ inline void store_in_cluster(float4* target, float4 x, uint64_t* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(target))),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}

// Copies shared memory to that of another thread block; the bytes arrive at its barrier.
__device__ inline void copy_in_cluster(void* target, const void* source, int bytes,
                                       uint64_t* barrier) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_shared, target, source, bytes,
                           barrier);
}

}  // namespace flash::ptx
