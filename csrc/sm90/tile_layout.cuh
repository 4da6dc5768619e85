// How a tile of 16-bit elements lies in shared memory, as TMA writes it and WGMMA reads it.
//
// A (rows, kCols) tile is made of parts (rows, kBoxCols), one after the other. The last part may be
// wider than the matrix. A row of a part has 128 bytes, in chunks of 16. Chunk c of row r is stored
// in place c ^ (r % 8): the swizzle of 128 bytes. Each part begins at a multiple of 1024 bytes.
#pragma once

namespace flash::sm90 {

constexpr int kBoxCols = 64;  // columns of a part, and of the box that TMA copies at once
constexpr int kPartRowBytes = kBoxCols * 2;
template <int kCols>
constexpr int kParts = (kCols + kBoxCols - 1) / kBoxCols;

}  // namespace flash::sm90
