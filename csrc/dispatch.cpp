#include "dispatch.h"

#include <iterator>
#include <sstream>
#include <stdexcept>

#include "instantiations.h"

namespace flash {

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat32:
      return "fp32";
    default:
      return "other";
  }
}

const char* name(FeatureSet features) { return features == FeatureSet::kPlain ? "plain" : "full"; }

std::vector<Instantiation> instantiations() {
  return {std::begin(kInstantiations), std::end(kInstantiations)};
}

ForwardLauncher find_forward(std::string_view family, DType dtype, int headdim,
                             FeatureSet features) {
  for (const Instantiation& row : kInstantiations) {
    if (row.family == family && row.dtype == dtype && row.headdim == headdim &&
        row.features == features) {
      return row.forward;
    }
  }
  std::ostringstream message;
  message << "no " << family << " forward kernel for " << name(dtype) << ", headdim " << headdim
          << ", feature set " << name(features) << "; this build has";
  for (const Instantiation& row : kInstantiations) {
    message << ' ' << row.family << '/' << name(row.dtype) << '/' << row.headdim << '/'
            << name(row.features);
  }
  if (kOnly[0] != '\0') message << " (it was built with FLASH_ATTN_ONLY=" << kOnly << ")";
  throw std::invalid_argument(message.str());
}

}  // namespace flash
