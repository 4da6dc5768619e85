// The rotary embedding on GPUs of compute capability 8.0 and newer.
#pragma once

#include "tokens/rotary_launch.cuh"

namespace flash::sm80 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using RotaryRow = tokens::RotaryRow<T, KV, Out, false>;

}  // namespace flash::sm80
