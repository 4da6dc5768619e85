#include "kernels.h"

#include <sstream>

#include "generated_kernels.h"

namespace flash {

const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> all(std::begin(kKernels), std::end(kKernels));
  return all;
}

std::string describe(const Kernel& kernel) {
  std::ostringstream text;
  text << kernel.backend << ' ' << kernel.operation << ' ' << name(kernel.dtype) << ' ';
  if (kernel.kv_dtype != kernel.dtype) text << name(kernel.kv_dtype) << ' ';
  text << kernel.headdim << '/' << kernel.headdim_v << ' ' << kernel.features;
  return text.str();
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "e4m3";
    case DType::kInt8:
      return "int8";
    case DType::kFloat32:
      return "fp32";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    default:
      return "other";
  }
}

int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace flash
