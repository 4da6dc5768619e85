// The pipeline between a producer, which fills shared memory, and its consumers, which read it.
//
// An operand has a few stages in shared memory, used in turn. Each stage has two mbarriers: "full"
// completes a phase when the data is there, "empty" when all consumers have read.
//
//   producer:  wait_empty, load (full completes), advance
//   consumer:  wait_full, compute, release, advance
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace flash::sm90 {

// Where a warp is in a pipeline: how often it has advanced. One register holds stage and phase.
template <int kStages>
struct PipelineState {
  uint32_t count = 0;

  __device__ int stage() const { return count % kStages; }
  __device__ uint32_t phase() const { return count / kStages % 2; }
  __device__ void advance() { ++count; }
  __device__ PipelineState next() const { return {count + 1}; }
};

// The same in two registers, which go on without a division where kStages is no power of two.
template <int kStages>
struct RingState {
  uint32_t place = 0, lap = 0;

  __device__ int stage() const { return place; }
  __device__ uint32_t phase() const { return lap; }
  __device__ RingState next() const {
    const bool wraps = place == kStages - 1;
    return {wraps ? 0 : place + 1, wraps ? lap ^ 1 : lap};
  }
  __device__ void advance() { *this = next(); }
};

// An arrival of a warp is one lane's, behind __syncwarp. compute-sanitizer's racecheck does not see
// that __syncwarp orders what the other lanes have done before it, and reports hazards. In a build
// for it (NVCC_APPEND_FLAGS=-DFLASH_ATTN_RACECHECK) every lane arrives, and each arrival is 32.
#ifdef FLASH_ATTN_RACECHECK
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// A phase of the barrier takes that many arrivals.
__device__ inline void init_barrier(uint64_t& barrier, int arrivals) {
  cuda::ptx::mbarrier_init(&barrier, arrivals * kArrivingLanes);
}

// By the thread that has initialised barriers: TMA sees them. Other threads need __syncthreads.
__device__ inline void fence_barrier_init() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}

// Waits for the end of a barrier's phase. A new barrier is in phase 0, and its phase 1 counts as
// over.
__device__ inline void wait(uint64_t& barrier, uint32_t phase) {
  while (!cuda::ptx::mbarrier_try_wait_parity(&barrier, phase)) {
  }
}

// Waits for two barriers, whose answers are under way at the same time.
__device__ inline void wait_for_both(uint64_t& a, uint32_t phase_a, uint64_t& b, uint32_t phase_b) {
  const bool a_over = cuda::ptx::mbarrier_try_wait_parity(&a, phase_a);
  const bool b_over = cuda::ptx::mbarrier_try_wait_parity(&b, phase_b);
  if (!a_over) wait(a, phase_a);
  if (!b_over) wait(b, phase_b);
}

// The same where threads have written what this one has WGMMA or TMA read. The fence stands here
// and not before the arrival: there it would wait for the stores.
__device__ inline void wait_for_stores(uint64_t& barrier, uint32_t phase) {
  wait(barrier, phase);
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// By one lane.
__device__ inline void arrive(uint64_t& barrier) {
  for (int i = 0; i < kArrivingLanes; ++i) cuda::ptx::mbarrier_arrive(&barrier);
}

// By a warp.
__device__ inline void arrive_of_warp(uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane < kArrivingLanes) cuda::ptx::mbarrier_arrive(&barrier);
}

// By one lane; the phase then waits for so many bytes from TMA too.
__device__ inline void arrive_expecting(uint64_t& barrier, int bytes) {
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                       cuda::ptx::space_shared, &barrier, bytes);
  for (int i = 1; i < kArrivingLanes; ++i) cuda::ptx::mbarrier_arrive(&barrier);
}

// The barriers of a pipeline, in shared memory. A warp that takes some of what is filled, and does
// not wait for the rest, misses phases: it needs more barriers than there are stages, one for each
// filling from one that it takes to the next.
template <int kStages, int kFullBarriers = kStages>
struct Pipeline {
  using State = PipelineState<kStages>;
  using Filled = PipelineState<kFullBarriers>;
  uint64_t full[kFullBarriers], empty[kStages];

  // By one thread, before fence_barrier_init. A stage is filled by so many arrivals, and by what
  // TMA brings; it is empty when so many warps have released it.
  __device__ void init(int consumers, int producers = 1) {
    for (uint64_t& barrier : full) init_barrier(barrier, producers);
    for (uint64_t& barrier : empty) init_barrier(barrier, consumers);
  }

  // A new pipeline is empty.
  __device__ void wait_empty(State state) { wait(empty[state.stage()], state.phase() ^ 1); }
  __device__ uint64_t& full_of(State state) { return full[Filled{state.count}.stage()]; }
  __device__ void wait_full(State state) { wait(full_of(state), Filled{state.count}.phase()); }
  __device__ void wait_full(RingState<kStages> state) { wait(full[state.stage()], state.phase()); }
  __device__ void wait_stored(State state) {
    wait_for_stores(full_of(state), Filled{state.count}.phase());
  }
  __device__ void release(State state, int lane) { arrive_of_warp(empty[state.stage()], lane); }
  __device__ void release(RingState<kStages> state, int lane) {
    arrive_of_warp(empty[state.stage()], lane);
  }
  // By a lane that reads for its whole warp.
  __device__ void release_alone(State state) { arrive(empty[state.stage()]); }
};

}  // namespace flash::sm90
