// The merge of two attentions on Hopper GPUs.
#pragma once

#include "tokens/merge_launch.cuh"

namespace flash::sm90 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using MergeRow = tokens::MergeRow<T, KV, Out, true>;

}  // namespace flash::sm90
