// The rotary embedding on Hopper GPUs.
#pragma once

#include "tokens/rotary_launch.cuh"

namespace flash::sm90 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using RotaryRow = tokens::RotaryRow<T, KV, Out, true>;

}  // namespace flash::sm90
