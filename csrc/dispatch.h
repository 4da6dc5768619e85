// From run-time values to one compiled kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>
#include <vector>

#include "params.h"

namespace flash {

using ForwardLauncher = void (*)(const ForwardParams&, cudaStream_t);

// A row of the dispatch table.
struct Instantiation {
  std::string_view family;  // "sm80"
  DType dtype;
  int headdim;
  FeatureSet features;
  ForwardLauncher forward;
};

// The rows of this build.
std::vector<Instantiation> instantiations();

// Throws std::invalid_argument, naming what is missing and what is built.
ForwardLauncher find_forward(std::string_view family, DType dtype, int headdim,
                             FeatureSet features);

const char* name(DType dtype);
const char* name(FeatureSet features);

}  // namespace flash
