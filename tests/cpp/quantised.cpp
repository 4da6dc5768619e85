// Operands of 8 bits, compiled for the host: how probabilities and transposed values meet in WGMMA
// (as the PTX ISA defines its operands and TMA its swizzle), which block of keys a scale belongs
// to, and the rotation of q and k. Input: for some packed batches the bounds of their sequences and
// the sequence and row of each block; then for each head dimension the signs of the rotation.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <random>

#include "warp_on_host.h"

using std::max, std::min;

struct {
  int x;
} threadIdx;  // named by code that does not run here
float __log2f(float);
float __fdividef(float, float);
bool __any_sync(unsigned, bool);
int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
uint32_t largest_halves(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](int shift) {
    return std::max(
        {static_cast<T>(a >> shift), static_cast<T>(b >> shift), static_cast<T>(c >> shift)});
  };
  return static_cast<uint16_t>(half(0)) | static_cast<uint32_t>(static_cast<uint16_t>(half(16)))
                                              << 16;
}
uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  return largest_halves<uint16_t>(a, b, c);
}
uint32_t __vimax3_s16x2(uint32_t a, uint32_t b, uint32_t c) {
  return largest_halves<int16_t>(a, b, c);
}
__half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}

#include "sm90/probabilities.cuh"
#include "sm90/rotation.cuh"
#include "sm90/scaled_blocks.cuh"
#include "sm90/square_transposer.cuh"
#include "sm90/warpgroup_matmul.cuh"

using namespace flash;
using namespace flash::sm90;

std::mt19937 engine(1);
bool failed = false;
void compare(const char* what, double found, double expected) {
  if (found == expected) return;
  if (!failed) std::printf("%s: %g, not %g\n", what, found, expected);
  failed = true;
}
int read_number() {
  int x = 0;
  if (std::scanf("%d", &x) != 1) failed = true;
  return x;
}
float number_of(unsigned char code) {
  __nv_fp8_e4m3 x;
  x.__x = code;
  return static_cast<float>(x);
}

// What TMA has written to byte `col` of row `row`, in rows of kRowBytes.
template <int kRowBytes>
int swizzled(int row, int col) {
  const int mask = kRowBytes == 128 ? row % 8 : row / 2 % 4;
  return row * kRowBytes + ((col / 16) ^ mask) * 16 + col % 16;
}
// Where WGMMA finds byte k of row n of a K-major matrix with this descriptor.
int place_in_matrix(uint64_t descriptor, int n, int k) {
  const int start = (descriptor & 0x3fff) << 4, eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  const int swizzle = static_cast<int>(descriptor >> 62);  // 1: 128 bytes, 2: 64 bytes
  const int row_bytes = swizzle == 1 ? 128 : 64;
  const int place = start + n / 8 * eight_rows + n % 8 * row_bytes + k;
  return place ^ (place >> 7 & (swizzle == 1 ? 7 : 3)) << 4;
}

// O = P V of 16 rows, a block of keys and kCols columns.
template <int kBlockN, int kCols, typename Probabilities>
void check_product() {
  constexpr float kProbabilityUnit = 1.f / (1 << Probabilities::kBits);
  static float p[16][kBlockN], v[kBlockN][kCols], operand[16][kBlockN];
  for (auto& row : p) {
    for (float& x : row) x = std::exp2(-static_cast<int>(engine() % 12));
  }
  for (int key = 0; key < kBlockN; ++key) {
    for (int col = 0; col < kCols; ++col) {
      const unsigned char code = (engine() % 2 ? 0x80 : 0) | (48 + engine() % 16);
      v[key][col] = number_of(code);
      shared_memory[swizzled<kBlockN>(col, place_of_key(key))] = code;
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    float scores[1][kBlockN / 8][4];
    double all[2] = {};
    for (int n = 0; n < kBlockN / 8; ++n) {
      for (int j = 0; j < 4; ++j) {
        const float x = p[g + j / 2 * 8][8 * n + 2 * t + j % 2];
        scores[0][n][j] = std::log2(x) * 2 + 5;
        all[j / 2] += x / kProbabilityUnit;
      }
    }
    SoftmaxState<1> softmax(1.f, {-INFINITY, -INFINITY}, false);
    softmax.reference[0] = softmax.reference[1] = 3.f;
    uint32_t packed[kBlockN / 32][4];
    const Exponents exponents{{0.5f, 0.5f}, {0.5f, 0.5f}};
    const Exponents relative = Probabilities::relative(exponents, softmax);
    const Probabilities probabilities(scores, relative, [] {});
    probabilities.store(packed);
    compare("outgrown", probabilities.outgrown(), false);
    if constexpr (Probabilities::kSummed) {
      for (int r = 0; r < 2; ++r) compare("sum of probabilities", probabilities.sums[r], all[r]);
    }
    for (int n = 0; n < kBlockN / 32; ++n) {
      for (int i = 0; i < 16; ++i) {  // PTX ISA: elements of A, m64k32 in 8 bits
        const int row = g + i / 4 % 2 * 8, col = t * 4 + i % 4 + i / 8 * 16;
        operand[row][32 * n + col] = number_of(packed[n][i / 4] >> i % 4 * 8 & 0xff);
      }
    }
  }
  const auto* const tile = reinterpret_cast<const __nv_fp8_e4m3*>(shared_memory);
  const KMajor<__nv_fp8_e4m3, kCols, uint64_t, kBlockN> values(tile);
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < kCols; ++col) {
      double found = 0, expected = 0;
      for (int key = 0; key < kBlockN; ++key) {
        const int place = place_in_matrix(values.step(key / 32), col, key % 32);
        found += operand[row][key] * number_of(shared_memory[place]) * kProbabilityUnit;
        expected += p[row][key] * v[key][col];
      }
      compare("P V", found, expected);
    }
  }
}

// Two squares of values as TMA writes them, transposed in place.
void check_squares() {
  constexpr int kPlace = 4096;
  static unsigned char v[2][kSquareRows][kSquareRows];
  for (int i = 0; i < 2; ++i) {
    for (int key = 0; key < kSquareRows; ++key) {
      for (int col = 0; col < kSquareRows; ++col) {
        v[i][key][col] = engine() % 256;
        const int place = kPlace + i * kSquareBytes + swizzled<kSquareRows>(key, col);
        shared_memory[place] = v[i][key][col];
      }
    }
  }
  run_lanes(32, [&](int lane) { SquareTransposer(lane).transpose_two<kSquareBytes>(kPlace); });
  for (int i = 0; i < 2; ++i) {
    const int begin = kPlace + i * kSquareBytes;
    const auto* const tile = reinterpret_cast<const __nv_fp8_e4m3*>(shared_memory + begin);
    const KMajor<__nv_fp8_e4m3, kSquareRows, uint64_t, kSquareRows> values(tile);
    for (int col = 0; col < kSquareRows; ++col) {
      for (int key = 0; key < kSquareRows; ++key) {
        const int place = place_in_matrix(values.step(key / 32), col, place_of_key(key % 32));
        compare("transposed value", shared_memory[place], v[i][key][col]);
      }
    }
  }
}

// Of one exponent, beside 0 in the first row: the code, and whether it has outgrown its reference.
struct Encoded {
  unsigned code;
  bool outgrown;
};
template <typename Probabilities>
Encoded encode(float exponent) {
  float scores[1][8][4] = {};
  scores[0][0][2] = exponent;  // of the second row
  SoftmaxState<1> softmax(1.f, {-INFINITY, -INFINITY}, false);
  softmax.reference[0] = softmax.reference[1] = 0.f;
  const Exponents relative = Probabilities::relative({{1.f, 1.f}, {0.f, 0.f}}, softmax);
  const Probabilities probabilities(scores, relative, [] {});
  uint32_t packed[2][4];
  probabilities.store(packed);
  compare("code of the reference", packed[0][0] & 0xff, 56 + 8 * Probabilities::kBits);
  return {packed[0][1] & 0xff, probabilities.outgrown()};
}
template <typename Probabilities>
void check_exponents(double most, double smallest_steps) {
  const double unit = 1 << Probabilities::kBits;
  double mean = 0;
  int count = 0;
  for (double x = -6 - Probabilities::kBits; x < 0; x += 0x1p-8, ++count) {
    const double ratio = number_of(encode<Probabilities>(x).code) / unit / std::exp2(x);
    if (std::abs(ratio - 1) > most) compare("probability over 2^exponent", ratio, 1);
    mean += ratio;
  }
  if (std::abs(mean / count - 1) > 2e-3) compare("mean ratio of probabilities", mean / count, 1);
  for (double x = -40 - Probabilities::kBits; x < -6 - Probabilities::kBits; x += 0x1p-8) {
    const double steps = number_of(encode<Probabilities>(x).code) * 512;
    if (std::abs(steps - unit * std::exp2(x) * 512) > smallest_steps) {
      compare("small probability", steps, unit * std::exp2(x) * 512);
    }
  }
  for (float x : {-INFINITY, -1e30f, -70000.f, -9000.f}) {
    compare("nothing", encode<Probabilities>(x).code, 0);
  }
  for (float x : {9.f - Probabilities::kBits, 100.f, 1e30f, INFINITY}) {
    compare("outgrown", encode<Probabilities>(x).outgrown, true);
  }
  compare("NaN", encode<Probabilities>(NAN).code & 0x7f, 0x7f);
  // A row that has seen no key, with and without one in this block.
  for (float x : {-INFINITY, 0.f}) {
    float scores[1][8][4];
    for (auto& tile : scores[0]) std::fill(tile, tile + 4, x);
    SoftmaxState<1> softmax(1.f, {-INFINITY, -INFINITY}, false);
    const Exponents relative = Probabilities::relative({{1.f, 1.f}, {0.f, 0.f}}, softmax);
    const Probabilities probabilities(scores, relative, [] {});
    uint32_t packed[2][4];
    probabilities.store(packed);
    compare("row without a key", probabilities.outgrown(), x == 0.f);
    if (x != 0.f) compare("probability of no key", packed[0][0], 0);
  }
}

// Which rows a block of packed keys has.
void check_blocks() {
  QuantiseParams params{};
  params.batch = read_number(), params.total_k = read_number();
  std::vector<int> bounds(params.batch + 1);
  for (int& x : bounds) x = read_number();
  params.cu_seqlens_k = bounds.data();
  const int blocks = params.total_k / kScaledKeys + params.batch;
  for (int block = 0; block < blocks; ++block) {
    const int first = read_number(), count = read_number();
    const QuantisedRows rows = keys_of_block(params, 0, 0, block);
    compare("rows of a block", rows.count, count);
    if (count > 0) compare("first row of a block", rows.first, first);
  }
}

// Of 16 rows; whole numbers leave no rounding.
template <typename T, int kDim>
void check_rotation(const std::vector<int>& matrix) {
  static T x[16][kDim];
  static float found[16][kDim];
  for (auto& row : x) {
    for (T& element : row) element = T(static_cast<float>(static_cast<int>(engine() % 201) - 100));
  }
  run_lanes(32, [&](int lane) {
    const int g = lane / 4, t = lane % 4;
    typename RandomRotation<T, kDim>::Rows part;
    RandomRotation<T, kDim>::apply(part, lane, [&](int i, int half) {
      uint4 eight;
      std::memcpy(&eight, &x[g + 8 * half][32 * i + 8 * t], sizeof eight);
      return eight;
    });
    for (int i = 0; i < kDim / 2; ++i) {
      const int pair = i / 4 % 4, p = i % 4;
      found[g + p / 2 * 8][i / 16 * 32 + 8 * t + 2 * pair + p % 2] = part[i / 16][pair][p];
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < kDim; ++col) {
      float expected = 0;
      for (int k = 0; k < kDim; ++k) expected += float(x[row][k]) * matrix[k * kDim + col];
      compare("rotation", found[row][col], expected);
    }
  }
}
template <int kDim>
void check_rotations() {
  std::vector<int> matrix(kDim * kDim);
  for (int& sign : matrix) sign = read_number();
  check_rotation<__half, kDim>(matrix);
  check_rotation<__nv_bfloat16, kDim>(matrix);
}

int main() {
  check_product<128, 64, LinearProbabilities<16, 16>>();
  check_product<128, 96, RoundedProbabilities<16, 6, 0>>();
  check_product<64, 64, LinearProbabilities<8, 0>>();
  check_product<64, 256, RoundedProbabilities<8, 3, 0>>();
  check_product<64, 256, LinearProbabilities<8, 8>>();
  check_squares();
  check_exponents<LinearProbabilities<8, 4>>(0.085, 1.5);
  check_exponents<RoundedProbabilities<8, 3, 0>>(0.0625, 0.5);
  for (int cases = read_number(); cases > 0; --cases) check_blocks();
  check_rotations<64>();
  check_rotations<96>();
  check_rotations<128>();
  check_rotations<192>();
  check_rotations<256>();
  return failed;
}
