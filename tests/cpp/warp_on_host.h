// A warp on the host: threads are its lanes, and instructions that all of them take part in are as
// PTX defines them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "byte_perm.h"

thread_local int this_lane;
inline int lane_count;  // of those that run
alignas(1024) inline unsigned char shared_memory[64 * 1024];

// All lanes meet here.
inline void meet() {
  static std::mutex mutex;
  static std::condition_variable all;
  static int waiting = 0, round = 0;
  std::unique_lock lock(mutex);
  const int mine = round;
  if (++waiting == lane_count) {
    waiting = 0, ++round;
    all.notify_all();
  } else {
    all.wait(lock, [&] { return round != mine; });
  }
}

// Calls function(lane) in each lane.
template <typename Function>
void run_lanes(int count, Function function) {
  lane_count = count;
  std::vector<std::thread> lanes;
  for (int i = 0; i < count; ++i) {
    lanes.emplace_back([&, i] {
      this_lane = i;
      function(i);
    });
  }
  for (std::thread& each : lanes) each.join();
}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - shared_memory;
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  static T all[32];
  all[this_lane] = x;
  meet();
  const T theirs = all[lane];
  meet();
  return theirs;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return __shfl_sync(mask, x, this_lane ^ distance);
}

namespace flash::ptx {

// The addresses of all lanes: those of 8 rows that are moved at once are in different banks.
inline const uint32_t (&exchange_addresses(uint32_t address))[32] {
  static uint32_t addresses[32];
  addresses[this_lane] = address;
  meet();
  for (int i = 0; i < 4; ++i) {
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) banks |= 1u << addresses[8 * i + row] / 16 % 8;
    if (banks != 255) {
      std::printf("8 rows share banks of shared memory\n");
      std::exit(1);
    }
  }
  return addresses;
}
inline void ldmatrix(uint32_t (&x)[4], uint32_t address, bool transposed) {
  const uint32_t (&addresses)[32] = exchange_addresses(address);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int row = transposed ? this_lane % 4 * 2 + j : this_lane / 4;
      const int col = transposed ? this_lane / 4 : this_lane % 4 * 2 + j;
      std::memcpy(reinterpret_cast<char*>(&x[i]) + 2 * j,
                  shared_memory + addresses[8 * i + row] + 2 * col, 2);
    }
  }
  meet();
}
inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t address) { ldmatrix(x, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t address) { ldmatrix(x, address, true); }
inline void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) {
  const uint32_t (&addresses)[32] = exchange_addresses(address);
  for (int i = 0; i < 4; ++i) {
    std::memcpy(shared_memory + addresses[8 * i + this_lane / 4] + this_lane % 4 * 4, &x[i], 4);
  }
  meet();
}

template <typename T>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static float all_a[16][16], all_b[16][8];
  const int g = this_lane / 4, t = this_lane % 4;
  for (int j = 0; j < 2; ++j) {
    const auto number = [&](uint32_t pair) {
      T x;
      std::memcpy(&x, reinterpret_cast<char*>(&pair) + 2 * j, 2);
      return static_cast<float>(x);
    };
    for (int i = 0; i < 4; ++i) all_a[g + i % 2 * 8][2 * t + i / 2 * 8 + j] = number(a[i]);
    all_b[2 * t + j][g] = number(b0), all_b[2 * t + 8 + j][g] = number(b1);
  }
  meet();
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) c[i] += all_a[g + i / 2 * 8][k] * all_b[k][2 * t + i % 2];
  }
  meet();
}
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  mma<__half>(c, a, b0, b1);
}
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         __nv_bfloat16) {
  mma<__nv_bfloat16>(c, a, b0, b1);
}

}  // namespace flash::ptx
