// The append to a cache on GPUs of compute capability 8.0 and newer.
#pragma once

#include "tokens/append_launch.cuh"

namespace flash::sm80 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using AppendRow = tokens::AppendRow<T, KV, Out, false>;

}  // namespace flash::sm80
