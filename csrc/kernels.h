// The kernels of this build.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace flash {

const std::vector<const Kernel*>& kernels();

// "sm80 forward fp16 64/64 plain"; with the dtype of k and v where it is another.
std::string describe(const Kernel& kernel);

const char* name(DType dtype);
int size_of(DType dtype);  // in bytes; 0 of kOther

}  // namespace flash
