// Of csrc/ptx/cluster.h what a test needs. A cluster's barrier is used once.
#pragma once

namespace flash::ptx {

inline int cluster_rank() { return host::current->block->rank; }
inline void cluster_arrive_relaxed() { ++host::arrived_in_cluster, ++host::progress; }
inline void cluster_wait() {
  while (host::arrived_in_cluster < static_cast<int>(host::fibers.size())) {
    host::wait_a_little("its cluster");
  }
}
template <typename T>
T* map_to_rank(T* x, int rank) {
  auto* const bytes = reinterpret_cast<unsigned char*>(x);
  const host::Block& block = *host::current->block;
  return reinterpret_cast<T*>(bytes + (rank - block.rank) * static_cast<long>(host::kWindow));
}
inline void store_in_cluster(float4* target, float4 x, uint64_t* barrier) {
  host::stores.push_back([=] {
    *target = x;
    host::arrive(barrier, 0, -16);
  });
  host::perhaps_wait();
}

}  // namespace flash::ptx
