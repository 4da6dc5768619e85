// In place of csrc/ptx/wgmma.h, for 16 bits and rows of 128 bytes.
#pragma once

namespace flash::ptx {

template <typename Sum, int kRowBytes = 128>
struct WgmmaDescriptor {
  static_assert(kRowBytes == 128);
  uint64_t start;

  WgmmaDescriptor(uint32_t shared_address, uint32_t part_bytes)
      : start((part_bytes >> 4) << 16 | (shared_address & 0x3ffff) >> 4) {}
  uint64_t operator+(uint32_t offset) const { return start + offset; }
};

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending, int kTiles>
void wgmma_wait(float (&)[kTiles][4]) {
  static_assert(kPending == 0);
  for (const auto& product : host::current->products) product();
  host::current->products.clear();
  host::perhaps_wait();
}

// The number at an address before the swizzle.
template <typename T>
float shared_number(uint32_t address) {
  T x;
  std::memcpy(&x, host::current->block->memory + (address ^ (address >> 7 & 7) << 4), 2);
  return static_cast<float>(x);
}
// Of a K-major matrix.
template <typename T>
float element_of(uint64_t descriptor, int row, int k) {
  return shared_number<T>((descriptor & 0x3fff) * 16 + row / 8 * 1024 + row % 8 * 128 + k * 2);
}

// At once or when somebody waits for it; products of a thread in their order.
// a_of(half, k): of the lane's rows
template <typename T, int kTransB, int kTiles, typename AOf>
void start_product(float (&d)[kTiles][4], AOf a_of, uint64_t b, bool accumulate) {
  const uint32_t start = (b & 0x3fff) * 16, part_bytes = (b >> 16 & 0x3fff) * 16;
  float (*const target)[kTiles][4] = &d;
  const auto b_of = [=](int k, int col) {
    if (kTransB == 0) return element_of<T>(b, col, k);
    return shared_number<T>(start + col / 64 * part_bytes + k * 128 + col % 64 * 2);
  };
  const auto product = [=] {
    for (int i = 0; i < kTiles * 4; ++i) {
      float& x = (*target)[i / 4][i % 4];
      if (!accumulate) x = 0.f;
      const int col = i / 4 * 8 + host::lane() % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) x += a_of(i / 2 % 2, k) * b_of(k, col);
    }
  };
  auto& products = host::current->products;
  if (products.empty() && host::below(2) == 0) return product();
  products.push_back(product);
}

template <int kTransB, int kTransA, int kTiles, typename T>
void wgmma(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate, T) {
  static_assert(kTransA == 0);
  const int row = host::current->thread % 128 / 32 * 16 + host::lane() / 4;
  const auto a_of = [=](int half, int k) { return element_of<T>(a, row + 8 * half, k); };
  start_product<T, kTransB>(d, a_of, b, accumulate);
}
template <int kTransB, int kTiles, typename T>
void wgmma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate, T) {
  struct {
    float x[2][16];
  } rows;
  for (int i = 0; i < 4; ++i) {
    const std::vector<uint64_t> pairs = host::exchange(a[i]);
    for (int j = 0; j < 8; ++j) {
      const auto pair = static_cast<uint32_t>(pairs[host::lane() / 4 * 4 + j / 2]);
      rows.x[i % 2][i / 2 * 8 + j] = number_of<T>(pair, j % 2);
    }
  }
  const auto a_of = [=](int half, int k) { return rows.x[half][k]; };
  start_product<T, kTransB>(d, a_of, b, accumulate);
}

}  // namespace flash::ptx
