// The append to a cache on Hopper GPUs.
#pragma once

#include "tokens/append_launch.cuh"

namespace flash::sm90 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using AppendRow = tokens::AppendRow<T, KV, Out, true>;

}  // namespace flash::sm90
