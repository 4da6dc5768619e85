// A call of a kernel, prepared: its tensors are read and checked, its parameters filled. It is
// launched again and again, with the addresses of any tensors of the same shapes, strides, dtypes,
// device and alignment.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "tensor_view.h"

namespace flash {

// Arguments and results by name; what is not there is None.
using Tensors = std::map<std::string, TensorView>;

// max_seqlen_q and max_seqlen_k (of packed sequences), dropout_p, and those of visit_numbers
// (params.h). shared_memory 0: what the device has.
using Numbers = std::map<std::string, double>;

class Call {
 public:
  // Throws std::invalid_argument, naming the argument, for what would be an illegal access.
  // (Users' mistakes are explained in Python, by _arguments.py.)
  Call(const Kernel& kernel, const Tensors& tensors, const Numbers& numbers);

  // The tensors whose addresses `launch` takes, in its order: those given, then the workspaces.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Workspace>& workspaces() const { return workspaces_; }

  void launch(void* const* addresses, cudaStream_t stream) const;

 private:
  template <typename Params>
  void prepare(const Tensors& tensors, const Numbers& numbers, const char* first);

  const Kernel* kernel_;
  int device_;
  std::shared_ptr<const CallParams> params_;  // the operation's, but for the addresses
  void (*launch_)(const Call&, void* const*, cudaStream_t);
  Launcher launcher_;
  std::vector<std::string> names_;
  std::vector<size_t> places_;  // of their addresses in the parameters
  std::vector<Workspace> workspaces_;
};

}  // namespace flash
