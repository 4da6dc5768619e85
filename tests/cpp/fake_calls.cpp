// What csrc/bindings.cpp is linked with where no GPU is: one kernel, which takes any tensors and
// one workspace. A launch writes the addresses that it was given to where its stream points.
#include <algorithm>
#include <stdexcept>

#include "call.h"
#include "graph_slots.h"
#include "kernels.h"

namespace flash {

const std::vector<const Kernel*>& kernels() {
  static const Kernel kernel{
      "forward", "fake", DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, 64, 64, "plain",
      kSoftcap,  1,      nullptr};
  static const std::vector<const Kernel*> all{&kernel};
  return all;
}

const char* name(DType dtype) { return dtype == DType::kBFloat16 ? "bf16" : "other"; }

Call::Call(const Kernel& kernel, const Tensors& tensors, const Numbers& numbers)
    : kernel_(&kernel) {
  for (const auto& [name, view] : tensors) {
    if (view.dtype != kernel.dtype) throw std::invalid_argument(name + ": dtype");
    names_.push_back(name);
  }
  workspaces_ = {{"scratch", static_cast<int64_t>(numbers.at("bytes")), true, 0}};
  names_.push_back("scratch");
}

void Call::launch(void* const* addresses, cudaStream_t stream) const {
  if (stream == nullptr) throw std::runtime_error("no such stream");
  std::copy_n(addresses, names_.size(), reinterpret_cast<void**>(stream));
}

std::optional<int64_t> zeros_owner(cudaStream_t stream) {
  if (stream == nullptr) return std::nullopt;
  return -static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream));
}

}  // namespace flash
