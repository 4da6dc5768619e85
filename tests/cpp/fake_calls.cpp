// What csrc/bindings.cpp is linked with where no GPU is: one kernel, which takes any tensors and
// one workspace. A launch writes the addresses that it was given to where its stream points. With
// the number "tell" it says what it has read of a tensor.
#include <algorithm>
#include <sstream>
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

std::string told(const TensorView& view) {
  std::ostringstream text;
  text << view.data << ", dtype " << static_cast<int>(view.dtype) << ", device " << view.device;
  for (int i = 0; i < view.ndim; ++i) text << ", " << view.size[i] << " by " << view.stride[i];
  return text.str();
}

Call::Call(const Kernel& kernel, const Tensors& tensors, const Numbers& numbers)
    : kernel_(&kernel) {
  for (const auto& [name, view] : tensors) {
    if (numbers.count("tell")) throw std::invalid_argument(told(view));
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
