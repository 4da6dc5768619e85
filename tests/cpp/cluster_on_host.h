// Thread blocks of a cluster on the host: threads are fibers, which a scheduler runs in random
// order. Copies by cp.async, stores to other thread blocks and products by WGMMA happen at random
// times between their start and what waits for them. Where nothing can go on, it says who waits for
// what, and ends the program.
//
// The headers that take the place of csrc/ptx and <cuda/ptx> are in tests/cpp/cluster.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __device__
#define __host__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(x)

using std::isnan, std::max, std::min;

struct Indices {
  unsigned x, y, z;
};
inline Indices threadIdx, blockIdx, gridDim;

namespace host {

inline std::mt19937 engine;
inline unsigned below(unsigned n) { return engine() % n; }

// The shared memory of thread block i of a cluster is window i.
constexpr size_t kWindow = 256 * 1024;
constexpr int kMostBlocks = 16;
inline auto* const memory =
    static_cast<unsigned char*>(std::aligned_alloc(kWindow, kMostBlocks* kWindow));

// Threads of which each waits for all.
struct Meeting {
  int arrived = 0;
  unsigned round = 0;
};
struct Warp {
  Meeting meeting;
  uint64_t slots[32];
};
struct Block {
  int rank, threads;
  Indices index;
  unsigned char* memory;
  Meeting meetings[16];  // by barrier
  bool any;
  std::vector<Warp> warps;
};
// What cp.async has started, in order.
struct Copy {
  enum { kBytes, kEndOfGroup, kArrival } what;
  uint32_t target;
  const void* source;  // null: zeros
  uint64_t* barrier;
  int bytes = 16;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  int thread;
  bool done = false;
  const char* waits_for = "";
  std::deque<Copy> copies;
  std::vector<std::function<void()>> products;
};
struct Barrier {
  int count, pending;
  long bytes = 0;
  unsigned phase = 0;
};

inline std::map<uint64_t*, Barrier> barriers;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<std::function<void()>> stores;  // to other thread blocks
inline Fiber* current;
inline ucontext_t scheduler;
inline std::function<void()> body;  // of a thread
inline int arrived_in_cluster;
inline uint64_t progress;  // grows with whatever somebody may wait for

[[noreturn]] inline void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

inline void wait_a_little(const char* what) {
  Fiber* const fiber = current;
  fiber->waits_for = what;
  swapcontext(&fiber->context, &scheduler);
}
// Where others may overtake.
inline void perhaps_wait() {
  if (below(16) > 0) return;
  ++progress;
  wait_a_little("nothing");
}

inline void meet(Meeting& meeting, int count, const char* what) {
  const unsigned round = meeting.round;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.round, ++progress;
  }
  while (meeting.round == round) wait_a_little(what);
}
inline Warp& warp() { return current->block->warps[current->thread / 32]; }
inline int lane() { return current->thread % 32; }
// Of all lanes.
inline std::vector<uint64_t> exchange(uint64_t x) {
  Warp& all = warp();
  all.slots[lane()] = x;
  meet(all.meeting, 32, "its warp");
  const std::vector<uint64_t> result(all.slots, all.slots + 32);
  meet(all.meeting, 32, "its warp");
  return result;
}

inline Barrier& barrier_at(uint64_t* place) {
  const auto found = barriers.find(place);
  if (found == barriers.end()) fail("a barrier is used that nobody has initialised");
  return found->second;
}
inline void arrive(uint64_t* place, int arrivals, long bytes) {
  Barrier& barrier = barrier_at(place);
  barrier.pending -= arrivals, barrier.bytes += bytes;
  ++progress;
  if (barrier.pending < 0) fail("too many arrivals at a barrier");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    ++barrier.phase;
  }
}

inline void run_first_copy(Fiber& fiber) {
  const Copy copy = fiber.copies.front();
  fiber.copies.pop_front();
  ++progress;
  if (copy.what == Copy::kArrival) arrive(copy.barrier, 1, 0);
  if (copy.what != Copy::kBytes) return;
  if (copy.source == nullptr) {
    std::memset(memory + copy.target, 0, copy.bytes);
  } else {
    std::memcpy(memory + copy.target, copy.source, copy.bytes);
  }
}

inline void start_fiber(Block& block, int thread) {
  constexpr size_t kStackBytes = 128 * 1024;
  auto fiber = std::make_unique<Fiber>();
  fiber->stack.reset(new char[kStackBytes]);
  fiber->block = &block;
  fiber->thread = thread;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = &scheduler;
  const auto run = [] {
    body();
    current->done = true;
    ++progress;
  };
  makecontext(&fiber->context, static_cast<void (*)()>(run), 0);
  fibers.push_back(std::move(fiber));
}

inline void fail_where_all_wait() {
  std::map<std::string, int> waiting;
  for (const auto& fiber : fibers) {
    if (fiber->done) continue;
    ++waiting["warpgroup " + std::to_string(fiber->thread / 128) + " for " + fiber->waits_for];
  }
  std::string text = "deadlock";
  for (const auto& [who, count] : waiting) text += ", " + std::to_string(count) + " of " + who;
  fail(text);
}

// Runs `body` in all threads of a cluster. blocks: their indices
inline void run_cluster(int threads, const std::vector<Indices>& blocks) {
  std::vector<Block> all(blocks.size());
  barriers.clear(), stores.clear(), fibers.clear();
  arrived_in_cluster = 0;
  std::memset(memory, 0xff, kWindow * blocks.size());  // NaN
  for (size_t i = 0; i < blocks.size(); ++i) {
    Block& block = all[i];
    block.rank = static_cast<int>(i), block.threads = threads, block.index = blocks[i];
    block.memory = memory + i * kWindow;
    block.warps.resize(threads / 32);
    for (int thread = 0; thread < threads; ++thread) start_fiber(block, thread);
  }
  const unsigned haste = below(3);  // of what is asynchronous
  const auto now = [haste] { return below(4) <= haste; };
  std::vector<Fiber*> order;
  for (const auto& fiber : fibers) order.push_back(fiber.get());
  size_t left = fibers.size();
  int idle_rounds = 0;
  while (left > 0) {
    const uint64_t before = progress;
    if (below(4) == 0) std::shuffle(order.begin(), order.end(), engine);
    bool pending = false;
    for (Fiber* const fiber : order) {
      for (unsigned n = now() ? below(6) : 0; n > 0 && !fiber->copies.empty(); --n) {
        run_first_copy(*fiber);
      }
      if (!stores.empty() && now()) {
        std::swap(stores[below(stores.size())], stores.back());
        const auto store = stores.back();
        stores.pop_back();
        store();
      }
      pending |= !fiber->copies.empty() || !stores.empty();
      if (fiber->done || below(8) == 0) continue;
      current = fiber;
      threadIdx = {static_cast<unsigned>(fiber->thread), 0, 0};
      blockIdx = fiber->block->index;
      swapcontext(&scheduler, &fiber->context);
      left -= fiber->done;
    }
    idle_rounds = progress == before && !pending ? idle_rounds + 1 : 0;
    if (idle_rounds > 50) fail_where_all_wait();
  }
  for (const auto& fiber : fibers) {
    for (const Copy& copy : fiber->copies) {
      if (copy.what != Copy::kEndOfGroup) fail("a copy outlives its thread block");
    }
  }
  if (!stores.empty()) fail("a store outlives its thread block");
}

}  // namespace host

inline void __syncthreads() {
  host::Block& block = *host::current->block;
  host::meet(block.meetings[0], block.threads, "its thread block");
}
inline bool __syncthreads_or(bool x) {
  __syncthreads();
  host::current->block->any = false;
  __syncthreads();
  host::current->block->any |= x;
  __syncthreads();
  return host::current->block->any;
}
inline void __syncwarp() { host::exchange(0); }
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  bits = host::exchange(bits)[lane & 31];
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return __shfl_sync(mask, x, host::lane() ^ distance);
}
inline bool __any_sync(unsigned, bool x) {
  for (const uint64_t theirs : host::exchange(x)) x |= theirs != 0;
  return x;
}
inline unsigned __ballot_sync(unsigned, bool);  // named by code that does not run here
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline void __threadfence_block() {}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - host::memory;
}
template <typename T>
T __ldcg(const T* x) {
  return *x;
}
template <typename T>
void __stcg(T* x, T value) {
  *x = value;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __log2f(float x) { return std::log2(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return uint64_t{x} * y >> 32; }
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<uint32_t>(both << std::min(shift, 32u) >> 32);
}
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);  // likewise

namespace flash::ptx {

// Element `i` of a register.
template <typename T>
float number_of(uint32_t pair, int i) {
  T x;
  std::memcpy(&x, reinterpret_cast<const char*>(&pair) + 2 * i, 2);
  return static_cast<float>(x);
}

inline void ldmatrix(uint32_t (&x)[4], uint32_t address, bool transposed) {
  const std::vector<uint64_t> addresses = host::exchange(address);
  const int g = host::lane() / 4, t = host::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int row = transposed ? t * 2 + j : g, col = transposed ? g : t * 2 + j;
      std::memcpy(reinterpret_cast<char*>(&x[i]) + 2 * j,
                  host::memory + addresses[8 * i + row] + 2 * col, 2);
    }
  }
  host::exchange(0);  // all have read
}
inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) { ldmatrix(x, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) { ldmatrix(x, address, true); }

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float all_a[16][16], all_b[16][8];
  const auto take = [&](uint32_t pair, auto element) {
    const std::vector<uint64_t> pairs = host::exchange(pair);
    for (int i = 0; i < 64; ++i) {
      element(i / 8, i / 2 % 4, i % 2) = number_of<T>(static_cast<uint32_t>(pairs[i / 2]), i % 2);
    }
  };
  for (int i = 0; i < 4; ++i) {
    take(a[i], [&](int g, int t, int j) -> float& {
      return all_a[g + i % 2 * 8][2 * t + i / 2 * 8 + j];
    });
  }
  take(b0, [&](int g, int t, int j) -> float& { return all_b[2 * t + j][g]; });
  take(b1, [&](int g, int t, int j) -> float& { return all_b[2 * t + 8 + j][g]; });
  const int g = host::lane() / 4, t = host::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) c[i] += all_a[g + i / 2 * 8][k] * all_b[k][2 * t + i % 2];
  }
}
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  mma<__half>(c, a, b0, b1);
}
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         __nv_bfloat16) {
  mma<__nv_bfloat16>(c, a, b0, b1);
}

}  // namespace flash::ptx
