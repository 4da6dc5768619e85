#include "dispatch.h"

#include <array>
#include <atomic>
#include <sstream>
#include <stdexcept>

#include "host/cuda_check.h"
#include "instantiations.h"

namespace flash {
namespace {

std::ostream& operator<<(std::ostream& stream, const KernelKey& key) {
  return stream << key.family << '/' << name(key.dtype) << '/' << key.headdim << '/'
                << key.headdim_v << '/' << name(key.features);
}

bool operator==(const KernelKey& a, const KernelKey& b) {
  return a.family == b.family && a.dtype == b.dtype && a.headdim == b.headdim &&
         a.headdim_v == b.headdim_v && a.features == b.features;
}

template <typename Table>
auto find(const Table& table, const char* pass, const KernelKey& key,
          const AttentionParams& params) {
  if (params.headdim <= key.headdim && params.headdim_v <= key.headdim_v) {
    for (const auto& row : table) {
      if (row.key == key) return row.launch;
    }
  }
  std::ostringstream message;
  message << "no " << pass << " kernel " << key << " for head dimensions " << params.headdim
          << " and " << params.headdim_v << "; this build has";
  for (const auto& row : table) message << ' ' << row.key;
  if (kOnly[0] != '\0') message << " (it was built with FLASH_ATTN_ONLY=" << kOnly << ")";
  throw std::invalid_argument(message.str());
}

}  // namespace

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
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

const char* name(FeatureSet features) { return features == FeatureSet::kPlain ? "plain" : "full"; }

std::vector<std::pair<const char*, KernelKey>> instantiations() {
  std::vector<std::pair<const char*, KernelKey>> rows;
  for (const auto& row : kForwardKernels) rows.emplace_back("forward", row.key);
  for (const auto& row : kBackwardKernels) rows.emplace_back("backward", row.key);
  return rows;
}

ForwardLauncher find_forward(const KernelKey& key, const AttentionParams& params) {
  return find(kForwardKernels, "forward", key, params);
}

BackwardLauncher find_backward(const KernelKey& key, const AttentionParams& params) {
  return find(kBackwardKernels, "backward", key, params);
}

int max_shared_memory(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const bool cached = device < static_cast<int>(known.size());
  int bytes = cached ? known[device].load(std::memory_order_relaxed) : 0;
  if (bytes == 0) {
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute(MaxSharedMemoryPerBlockOptin)");
    if (cached) known[device].store(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

}  // namespace flash
