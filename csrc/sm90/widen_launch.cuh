// The widening of a cache on Hopper GPUs.
#pragma once

#include "tokens/widen_launch.cuh"

namespace flash::sm90 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using WidenRow = tokens::WidenRow<T, KV, Out, true>;

}  // namespace flash::sm90
