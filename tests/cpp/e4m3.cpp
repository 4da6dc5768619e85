// Products of a warp on keys and values in e4m3 (decode/e4m3_matmul.h), compiled for the host: 32
// threads are the lanes, and ldmatrix and mma are as PTX defines them. Whole numbers leave no
// rounding, so the results are exact.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <random>

#include "warp_on_host.h"

struct {
  operator int() const { return this_lane; }
} const lane;
struct {
  decltype(lane)& x;
} const threadIdx{lane};

#include "decode/e4m3_matmul.h"

using namespace flash;

std::mt19937 engine(1);

float number_of(unsigned char code) {
  __nv_fp8_e4m3 x;
  x.__x = code;
  return static_cast<float>(x);
}

bool failed = false;
void compare(const char* what, float found, float expected) {
  if (found == expected) return;
  if (!failed) std::printf("%s: %g, not %g\n", what, found, expected);
  failed = true;
}

// Of 16 rows and 32 keys: q holds whole numbers, K and V one of the codes.
template <typename T, int kHeadDim>
void check() {
  constexpr int kRows = 16, kKeys = 32;
  using QueryLayout = TileLayout<kHeadDim>;
  using Bytes = decode::ByteLayout<kHeadDim>;
  const uint32_t k_tile = kRows * kHeadDim * 2, v_tile = k_tile + kKeys * kHeadDim;
  std::vector<float> q(kRows * kHeadDim), k(kKeys * kHeadDim), v(kKeys * kHeadDim),
      p(kRows * kKeys);
  for (float& x : q) x = static_cast<int>(engine() % 9) - 4;
  for (float& x : p) x = engine() % 5;
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kHeadDim; ++col) {
      const T x = static_cast<T>(q[row * kHeadDim + col]);
      std::memcpy(shared_memory + QueryLayout::offset(row, col / 8) + col % 8 * 2, &x, 2);
    }
  }
  for (int key = 0; key < kKeys; ++key) {
    for (int col = 0; col < kHeadDim; ++col) {
      const unsigned char codes[2] = {static_cast<unsigned char>(48 + engine() % 16),
                                      static_cast<unsigned char>(184 + engine() % 16)};
      const uint32_t place = Bytes::offset(key, col / 16) + col % 16;
      shared_memory[k_tile + place] = codes[engine() % 2];
      shared_memory[v_tile + place] = codes[engine() % 2];
      k[key * kHeadDim + col] = number_of(shared_memory[k_tile + place]);
      v[key * kHeadDim + col] = number_of(shared_memory[v_tile + place]);
    }
  }
  run_lanes(32, [&](int i) {
    const int g = i / 4, t = i % 4;
    decode::order_queries<32, kRows, kHeadDim>(shared_memory);
    meet();
    float scores[1][kKeys / 8][4], out[1][kHeadDim / 8][4] = {};
    decode::compute_e4m3_scores<T, kHeadDim>(scores, 0, k_tile, i);
    for (int n = 0; n < kKeys / 8; ++n) {
      for (int j = 0; j < 4; ++j) {
        const int row = g + j / 2 * 8, key = n * 8 + t * 2 + j % 2;
        float expected = 0;
        for (int d = 0; d < kHeadDim; ++d)
          expected += q[row * kHeadDim + d] * k[key * kHeadDim + d];
        compare("S", scores[0][n][j] * kE4m3Unit, expected);
      }
    }
    const uint32_t values = v_tile + Bytes::by_columns(i);
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t operand[1][4];
      for (int j = 0; j < 4; ++j) {
        const float* const x = &p[(g + j % 2 * 8) * kKeys + n * 16 + j / 2 * 8 + t * 2];
        const __half pair[2] = {__half(x[0]), __half(x[1])};
        std::memcpy(&operand[0][j], pair, 4);
      }
      decode::multiply_by_e4m3_values<kHeadDim>(out, operand, values, n);
    }
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      for (int r = 0; r < 2; ++r) {
        const float4 columns = decode::columns_of(out[0][n], out[0][n + 1], r);
        const float four[4] = {columns.x, columns.y, columns.z, columns.w};
        for (int c = 0; c < 4; ++c) {
          float expected = 0;
          for (int key = 0; key < kKeys; ++key) {
            expected += p[(g + r * 8) * kKeys + key] * v[key * kHeadDim + n * 8 + t * 4 + c];
          }
          compare("O", four[c] * kE4m3Unit, expected);
        }
      }
    }
  });
}

template <typename T>
void check_codes() {
  for (unsigned code = 0; code < 256; ++code) {
    const uint32_t bytes = code | (255 - code) << 8 | code << 16 | (255 - code) << 24;
    const uint32_t pairs[2] = {widen_even<T>(bytes), widen_odd<T>(bytes)};
    for (int i = 0; i < 2; ++i) {
      T x[2];
      std::memcpy(x, &pairs[i], 4);
      const unsigned char given = i ? 255 - code : code;
      const bool is_nan = given % 128 == 127;
      const float expected = is_nan ? (given < 128 ? 480.f : -480.f) : number_of(given);
      for (T half : x) compare("number", static_cast<float>(half) * kE4m3Unit, expected);
    }
  }
}

int main() {
  check_codes<__half>();
  check_codes<__nv_bfloat16>();
  check<__half, 32>(), check<__nv_bfloat16, 32>();
  check<__half, 64>(), check<__nv_bfloat16, 64>();
  check<__half, 96>(), check<__nv_bfloat16, 96>();
  check<__half, 128>(), check<__nv_bfloat16, 128>();
  check<__half, 192>(), check<__nv_bfloat16, 192>();
  check<__half, 256>(), check<__nv_bfloat16, 256>();
  return failed;
}
