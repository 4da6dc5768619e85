// Encodes CUtensorMap, what TMA, the copy engine, needs to know of a tensor. The only place that
// does.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "host/driver.h"
#include "sm90/tile_layout.cuh"

namespace flash::sm90 {

// One dimension of a tensor, outside the innermost, and of the box that is copied at once.
struct MapDim {
  int64_t size;
  int64_t stride;  // in elements, a multiple of 16 bytes
  int box;
};

// Another tensor of the same layout.
inline void replace_address(CUtensorMap& map, void* data) {
  static const auto replace =
      find_in_driver<decltype(cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  const CUresult result = replace(&map, data);
  if (result != CUDA_SUCCESS) {
    std::ostringstream message;
    message << "cuTensorMapReplaceAddress: error " << result << " for address " << data;
    throw std::runtime_error(message.str());
  }
}

// The map of a tensor of T. A box has kBoxCols<T> of its `cols` innermost elements and lies in
// shared memory as a part of a tile (tile_layout.cuh). Outside the tensor it reads zeros.
// kRowBytes: of a row of the box, if it is not that of a part
template <typename T, int kDims, int kRowBytes = kPartRowBytes>
CUtensorMap encode_tensor_map(const void* data, int cols, const MapDim (&dims)[kDims]) {
  cuuint64_t sizes[kDims + 1] = {static_cast<cuuint64_t>(cols)}, strides[kDims];
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  cuuint32_t box[kDims + 1] = {kRowBytes / sizeof(T)}, steps[kDims + 1] = {1};
  for (int i = 0; i < kDims; ++i) {
    sizes[i + 1] = dims[i].size;
    strides[i] = dims[i].size == 1 ? 16 : dims[i].stride * sizeof(T);
    box[i + 1] = dims[i].box;
    steps[i + 1] = 1;
  }
  CUtensorMap map;
  // TMA copies bits: of the type only the size counts, as zeros are bits 0 in all.
  constexpr CUtensorMapDataType kType =
      sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static_assert(sizeof(T) <= 2);
  static const auto encode =
      find_in_driver<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const CUresult result =
      encode(&map, kType, kDims + 1, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::ostringstream message;
    message << "cuTensorMapEncodeTiled: error " << result << " for address " << data << ", " << cols
            << " columns";
    for (const MapDim& dim : dims) {
      message << ", dimension " << dim.size << " stride " << dim.stride << " box " << dim.box;
    }
    throw std::runtime_error(message.str());
  }
  return map;
}

}  // namespace flash::sm90
