// The decode kernel of Hopper GPUs.
#pragma once

#include "decode/decode_launch.cuh"

namespace flash::sm90 {

template <typename T, typename KV, typename Out, int kHeadDim, int kHeadDimV, FeatureSet kFeatures>
using DecodeRow = decode::DecodeRow<T, KV, Out, kHeadDim, kHeadDimV, kFeatures, true>;

}  // namespace flash::sm90
