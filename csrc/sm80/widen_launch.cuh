// The widening of a cache on GPUs of compute capability 8.0 and newer.
#pragma once

#include "tokens/widen_launch.cuh"

namespace flash::sm80 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using WidenRow = tokens::WidenRow<T, KV, Out, false>;

}  // namespace flash::sm80
