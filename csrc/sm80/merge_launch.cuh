// The merge of two attentions on GPUs of compute capability 8.0 and newer.
#pragma once

#include "tokens/merge_launch.cuh"

namespace flash::sm80 {

template <typename T, typename KV, typename Out, int, int, FeatureSet>
using MergeRow = tokens::MergeRow<T, KV, Out, false>;

}  // namespace flash::sm80
