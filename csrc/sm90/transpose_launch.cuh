// Launches the pass that transposes values of e4m3.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "host/launch.h"
#include "kernel.h"
#include "params.h"
#include "sm90/tensor_map.h"
#include "sm90/transpose_kernel.cuh"

namespace flash::sm90 {

// From params.raw_v to a workspace, params.v. kDim: the most columns
template <int kDim>
std::function<void(const QuantisedParams&, cudaStream_t)> prepare_transpose(
    const QuantisedParams& params, Workspaces& wanted) {
  QuantiseParams values{};
  values.batch = params.batch, values.seqlen_k = params.seqlen_k;
  values.total_k = params.total_k, values.blocks = params.places_v / kScaledKeys;
  values.nheads_kv = params.nheads_kv, values.cu_seqlens_k = params.cu_seqlens_k;
  constexpr int kUnits = kUnitsOfTile<kDim>, kMostTiles = INT_MAX / kUnits;
  const int64_t tiles = tiles_of_keys(values);
  if (tiles > kMostTiles) {
    throw std::invalid_argument("v: got " + std::to_string(tiles) +
                                " blocks of rows; accepted: up to " + std::to_string(kMostTiles));
  }
  wanted.add("transposed_v", reinterpret_cast<uint8_t* const&>(params.v.data),
             tiles * kScaledKeys * params.headdim_v);

  const bool packed = params.cu_seqlens_k != nullptr;
  const auto map_of = [&](const Operand& x, int cols, int64_t rows) {
    return encode_tensor_map<uint8_t, 3, kSquareRows>(
        params.raw_v.data, cols,
        {{rows, x.row_stride, kSquareRows},
         {params.nheads_kv, x.head_stride, 1},
         {packed ? 1 : params.batch, x.batch_stride, 1}});
  };
  const TransposeMaps prepared{
      map_of(params.raw_v, params.headdim_v, packed ? params.total_k : params.seqlen_k),
      map_of(params.v, params.places_v, params.headdim_v)};
  const int units = static_cast<int>(tiles) * kUnits;
  const int grid = std::min((units + kTransposeWarps - 1) / kTransposeWarps,
                            kTransposeBlocks * multiprocessors());
  constexpr size_t kShared = kTransposeWarps * sizeof(TransposeStages);
  static std::atomic<uint64_t> devices{0};
  allow_shared_memory(transpose_kernel<kDim>, kShared, devices);
  return [=](const QuantisedParams& bound, cudaStream_t stream) {
    QuantiseParams found = values;
    found.cu_seqlens_k = bound.cu_seqlens_k, found.seqused_k = bound.seqused_k;
    TransposeMaps maps = prepared;
    replace_address(maps.rows, bound.raw_v.data);
    replace_address(maps.transposed, bound.v.data);
    launch_overlapping(transpose_kernel<kDim>, grid, kTransposeThreads, kShared, stream,
                       "launch of the sm90 transpose kernel", found, maps, units);
  };
}

}  // namespace flash::sm90
