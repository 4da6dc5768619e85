// The decode kernel of Ampere-class GPUs.
#pragma once

#include "decode/decode_launch.cuh"

namespace flash::sm80 {

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
using DecodeRow = decode::DecodeRow<T, KV, Out, kHeadDim, kHeadDimV, kFeatures, false>;

}  // namespace flash::sm80
