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

float __log2f(float);
float __fdividef(float, float);
bool __any_sync(unsigned, bool);
int __popc(unsigned x) { return __builtin_popcount(x); }

#include "sm90/e4m3_probabilities.cuh"
#include "sm90/rotation.cuh"
#include "sm90/scaled_blocks.cuh"
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
template <int kBlockN, int kCols>
void check_product() {
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
    double all[2] = {}, largest[2] = {};
    for (int n = 0; n < kBlockN / 8; ++n) {
      for (int j = 0; j < 4; ++j) {
        const float x = p[g + j / 2 * 8][8 * n + 2 * t + j % 2];
        scores[0][n][j] = std::log2(x) * 2 + 5;
        all[j / 2] += x / kProbabilityUnit;
      }
      for (int r = 0; r < 2 && n % 2 == 1; ++r) {
        double sum = 0;
        for (int key : {8 * n - 8, 8 * n}) {
          sum += (p[g + r * 8][key + 2 * t] + p[g + r * 8][key + 2 * t + 1]) / kProbabilityUnit;
        }
        largest[r] = std::max(largest[r], sum);
      }
    }
    SoftmaxState<1> softmax(1.f, {-INFINITY, -INFINITY}, false);
    softmax.reference[0] = softmax.reference[1] = 3.f;
    uint32_t packed[kBlockN / 32][4];
    const Exponents exponents{{0.5f, 0.5f}, {0.5f, 0.5f}};
    const auto sums = exponentiate_quantised(packed, softmax, scores, exponents);
    for (int r = 0; r < 2; ++r) {
      compare("sum of probabilities", sums.all[r], all[r]);
      compare("largest sum of four", sums.largest[r], largest[r]);
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
  check_product<128, 64>();
  check_product<128, 96>();
  check_product<64, 64>();
  check_product<64, 256>();
  for (int cases = read_number(); cases > 0; --cases) check_blocks();
  check_rotations<64>();
  check_rotations<96>();
  check_rotations<128>();
  check_rotations<192>();
  check_rotations<256>();
  return failed;
}
