// How a tile lies in shared memory, as TMA writes it and WGMMA reads it.
//
// A (rows, kCols) tile of T is made of parts (rows, kBoxCols<T>), one after the other. The last
// part may be wider than the matrix. A row of a part has 128 bytes, in chunks of 16. Chunk c of row
// r is stored in place c ^ (r % 8): the swizzle of 128 bytes. Each part begins at a multiple of
// 1024 bytes.
#pragma once

namespace flash::sm90 {

constexpr int kPartRowBytes = 128;
// Columns of a part, and of the box that TMA copies at once.
template <typename T>
constexpr int kBoxCols = kPartRowBytes / sizeof(T);
template <typename T, int kCols>
constexpr int kParts = (kCols + kBoxCols<T> - 1) / kBoxCols<T>;
// Where chunk `chunk` of a row begins in a tile of kRows rows, in bytes.
template <int kRows>
__device__ constexpr int place_of_chunk(int row, int chunk) {
  constexpr int kChunks = kPartRowBytes / 16;  // of a row of a part
  return (chunk / kChunks * kRows + row) * kPartRowBytes + (chunk % kChunks ^ row % kChunks) * 16;
}
// Elements of a tile.
template <typename T, int kRows, int kCols>
constexpr int kTileSize = kParts<T, kCols> * kRows * kBoxCols<T>;

}  // namespace flash::sm90
