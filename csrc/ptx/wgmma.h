// Matrix multiply-accumulate by one warpgroup: wgmma (Hopper).
//
// D, (64, N) in registers: warp w of the group holds rows 16 w .. 16 w + 15, each 8 columns like an
// accumulator of m16n8 (ptx/mma_sync.h), d[n] being columns 8 n .. 8 n + 7.
// A, (64, K): in registers like the A operand of m16n8k16, or in shared memory. B, (K, N): in
// shared memory. What lies there is given by a descriptor. K is 32 bytes: 16 elements of 16 bits,
// 32 of 8 bits. In 8 bits a register of A holds four columns, 4 t .. 4 t + 3 of the 16 where 16
// bits have 2 t, 2 t + 1 of 8, and B has to be K-major.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace flash::ptx {

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Matrix Descriptor Format"
// Matrices in shared memory lie in rows of kRowBytes, 128 or 64, swizzled as cuTensorMapEncodeTiled
// does it.
// For a K-major matrix (rows of k) `part_bytes` does not count; for an MN-major one it is the
// distance from one 64 columns to the next.
// The upper half is the same for all, and what is added, in units of 16 bytes, leaves it alone. So
// Sum, in which the compiler adds, is uint64_t or uint32_t: the better one of a kernel is measured.
template <typename Sum, int kRowBytes = 128>
struct WgmmaDescriptor {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  Sum start;

  __device__ constexpr WgmmaDescriptor(uint32_t shared_address, uint32_t part_bytes)
      : start(
            static_cast<Sum>(kUpper | (part_bytes >> 4) << 16 | (shared_address & 0x3ffff) >> 4)) {}

  __device__ constexpr uint64_t operator+(uint32_t offset) const {
    if constexpr (sizeof(Sum) == sizeof(uint64_t)) return start + offset;
    return kUpper | (start + offset);
  }

 private:
  static constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2, kEightRows = 8 * kRowBytes;
  static constexpr uint64_t kUpper = kSwizzle << 62 | (kEightRows >> 4) << 32;
};

// PTX ISA, "Asynchronous wgmma Proxy Operations: wgmma.fence": before the first wgmma, and after
// registers that one will read or write were written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// PTX ISA, "Asynchronous wgmma Proxy Operations: wgmma.commit_group"
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Hides from the compiler what x is: it is read no earlier.
__device__ inline void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void hold(int& x) { asm volatile("" : "+r"(x)::"memory"); }

template <int kTiles, typename Sum>
__device__ inline void hold(Sum (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) hold(d[n][j]);
  }
}

// Waits for all committed groups but the last kPending; then `d` holds what they computed.
// PTX ISA, "Asynchronous wgmma Proxy Operations: wgmma.wait_group"
template <int kPending, typename... D>
__device__ inline void wgmma_wait(D&... d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
  (hold(d), ...);
}

// FLASH_TEXT_g names the operands of g groups of 16 columns in assembly, FLASH_REGISTERS_g hands
// them over, with the constraint C.
#define FLASH_REGISTERS(C, g)                                                                   \
  C(d[2 * (g)][0]), C(d[2 * (g)][1]), C(d[2 * (g)][2]), C(d[2 * (g)][3]), C(d[2 * (g) + 1][0]), \
      C(d[2 * (g) + 1][1]), C(d[2 * (g) + 1][2]), C(d[2 * (g) + 1][3])
#define FLASH_TEXT_HALF "%0, %1, %2, %3"
#define FLASH_TEXT_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_TEXT_2 FLASH_TEXT_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_TEXT_3 FLASH_TEXT_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_TEXT_4 FLASH_TEXT_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_TEXT_5 FLASH_TEXT_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_TEXT_6 FLASH_TEXT_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_TEXT_7 FLASH_TEXT_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_TEXT_8 FLASH_TEXT_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_TEXT_9 FLASH_TEXT_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_TEXT_10 FLASH_TEXT_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_TEXT_11 FLASH_TEXT_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_TEXT_12 FLASH_TEXT_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_TEXT_13 FLASH_TEXT_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_TEXT_14 FLASH_TEXT_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_TEXT_15 FLASH_TEXT_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_TEXT_16 FLASH_TEXT_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_REGISTERS_HALF(C) C(d[0][0]), C(d[0][1]), C(d[0][2]), C(d[0][3])
#define FLASH_REGISTERS_1(C) FLASH_REGISTERS(C, 0)
#define FLASH_REGISTERS_2(C) FLASH_REGISTERS_1(C), FLASH_REGISTERS(C, 1)
#define FLASH_REGISTERS_3(C) FLASH_REGISTERS_2(C), FLASH_REGISTERS(C, 2)
#define FLASH_REGISTERS_4(C) FLASH_REGISTERS_3(C), FLASH_REGISTERS(C, 3)
#define FLASH_REGISTERS_5(C) FLASH_REGISTERS_4(C), FLASH_REGISTERS(C, 4)
#define FLASH_REGISTERS_6(C) FLASH_REGISTERS_5(C), FLASH_REGISTERS(C, 5)
#define FLASH_REGISTERS_7(C) FLASH_REGISTERS_6(C), FLASH_REGISTERS(C, 6)
#define FLASH_REGISTERS_8(C) FLASH_REGISTERS_7(C), FLASH_REGISTERS(C, 7)
#define FLASH_REGISTERS_9(C) FLASH_REGISTERS_8(C), FLASH_REGISTERS(C, 8)
#define FLASH_REGISTERS_10(C) FLASH_REGISTERS_9(C), FLASH_REGISTERS(C, 9)
#define FLASH_REGISTERS_11(C) FLASH_REGISTERS_10(C), FLASH_REGISTERS(C, 10)
#define FLASH_REGISTERS_12(C) FLASH_REGISTERS_11(C), FLASH_REGISTERS(C, 11)
#define FLASH_REGISTERS_13(C) FLASH_REGISTERS_12(C), FLASH_REGISTERS(C, 12)
#define FLASH_REGISTERS_14(C) FLASH_REGISTERS_13(C), FLASH_REGISTERS(C, 13)
#define FLASH_REGISTERS_15(C) FLASH_REGISTERS_14(C), FLASH_REGISTERS(C, 14)
#define FLASH_REGISTERS_16(C) FLASH_REGISTERS_15(C), FLASH_REGISTERS(C, 15)

// d += a * b, or d = a * b. kTransA, kTransB: a, b is MN-major. The type of a and b chooses the
// instruction; it has one line in FLASH_WGMMA. The numbers are those of the operands after d.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async"
#define FLASH_WGMMA_OF(N, GROUPS, T, SHAPE, I0, I1, I2, I3, I4, I5, I6)                            \
  template <int kTransB>                                                                           \
  __device__ inline void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,           \
                               bool accumulate, T) {                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FLASH_TEXT_##GROUPS             \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}\n"  \
                 : FLASH_REGISTERS_##GROUPS("+f")                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                             \
                   "r"(static_cast<int>(accumulate)), "n"(kTransB));                               \
  }                                                                                                \
  template <int kTransB, int kTransA>                                                              \
  __device__ inline void wgmma(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool accumulate, T) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FLASH_TEXT_##GROUPS             \
                 "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I4 ", %" #I3 ";\n}\n"                        \
                 : FLASH_REGISTERS_##GROUPS("+f")                                                  \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransB), "n"(kTransA)); \
  }
#define FLASH_WGMMA(N, GROUPS, ...)                                 \
  FLASH_WGMMA_OF(N, GROUPS, __half, "k16.f32.f16.f16", __VA_ARGS__) \
  FLASH_WGMMA_OF(N, GROUPS, __nv_bfloat16, "k16.f32.bf16.bf16", __VA_ARGS__)

// The same in 8 bits: sums are of type D, float (constraint "f") or int ("r"). Sums of int wrap.
// MODIFIERS: what the instruction has behind the predicate, of D's type.
#define FLASH_WGMMA_8_OF(N, GROUPS, T, D, C, SHAPE, MODIFIERS, I0, I1, I2, I3, I4, I5, I6)     \
  template <int kTransB>                                                                       \
  __device__ inline void wgmma(D(&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,            \
                               bool accumulate, T) {                                           \
    static_assert(kTransB == 0);                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                      \
                 ", 0;\n"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FLASH_TEXT_##GROUPS         \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p" MODIFIERS ";\n}\n" \
                 : FLASH_REGISTERS_##GROUPS(C)                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                         \
                   "r"(static_cast<int>(accumulate)));                                         \
  }                                                                                            \
  template <int kTransB, int kTransA>                                                          \
  __device__ inline void wgmma(D(&d)[N / 8][4], uint64_t a, uint64_t b, bool accumulate, T) {  \
    static_assert(kTransB == 0 && kTransA == 0);                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                      \
                 ", 0;\n"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" FLASH_TEXT_##GROUPS         \
                 "}, %" #I0 ", %" #I1 ", p" MODIFIERS ";\n}\n"                                 \
                 : FLASH_REGISTERS_##GROUPS(C)                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
  }
#define FLASH_WGMMA_8(N, GROUPS, ...)                                                    \
  FLASH_WGMMA_8_OF(N, GROUPS, __nv_fp8_e4m3, float, "+f", "k32.f32.e4m3.e4m3", ", 1, 1", \
                   __VA_ARGS__)                                                          \
  FLASH_WGMMA_8_OF(N, GROUPS, int8_t, int, "+r", "k32.s32.s8.s8", "", __VA_ARGS__)

FLASH_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
FLASH_WGMMA(48, 3, 24, 25, 26, 27, 28, 29, 30)
FLASH_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
FLASH_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

FLASH_WGMMA_8(8, HALF, 4, 5, 6, 7, 8, 9, 10)
FLASH_WGMMA_8(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_WGMMA_8(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_WGMMA_8(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_WGMMA_8(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_WGMMA_8(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_WGMMA
#undef FLASH_WGMMA_8
#undef FLASH_WGMMA_8_OF
#undef FLASH_WGMMA_OF
#undef FLASH_REGISTERS
#undef FLASH_TEXT_HALF
#undef FLASH_REGISTERS_HALF
#undef FLASH_TEXT_1
#undef FLASH_REGISTERS_1
#undef FLASH_TEXT_2
#undef FLASH_REGISTERS_2
#undef FLASH_TEXT_3
#undef FLASH_REGISTERS_3
#undef FLASH_TEXT_4
#undef FLASH_REGISTERS_4
#undef FLASH_TEXT_5
#undef FLASH_REGISTERS_5
#undef FLASH_TEXT_6
#undef FLASH_REGISTERS_6
#undef FLASH_TEXT_7
#undef FLASH_REGISTERS_7
#undef FLASH_TEXT_8
#undef FLASH_REGISTERS_8
#undef FLASH_TEXT_9
#undef FLASH_REGISTERS_9
#undef FLASH_TEXT_10
#undef FLASH_REGISTERS_10
#undef FLASH_TEXT_11
#undef FLASH_REGISTERS_11
#undef FLASH_TEXT_12
#undef FLASH_REGISTERS_12
#undef FLASH_TEXT_13
#undef FLASH_REGISTERS_13
#undef FLASH_TEXT_14
#undef FLASH_REGISTERS_14
#undef FLASH_TEXT_15
#undef FLASH_REGISTERS_15
#undef FLASH_TEXT_16
#undef FLASH_REGISTERS_16

}  // namespace flash::ptx
