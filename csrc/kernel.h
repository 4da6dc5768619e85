// What a compiled kernel says of itself. Each generated source defines one row; kernels.h has those
// of this build.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "params.h"

namespace flash {

// Elements of the int32 workspace that is zero before and after each launch: launches of a stream
// share it.
constexpr int kKeptZero = 2048;

// Memory that a launch needs beside its arguments and results.
struct Workspace {
  const char* name;
  int64_t bytes;
  bool kept_zero;
  size_t place;  // of the pointer to it in the operation's parameters
};

// The workspaces of one call, as its kernel asks for them.
class Workspaces {
 public:
  explicit Workspaces(const CallParams& params) : params_(reinterpret_cast<const char*>(&params)) {}

  // pointer: the field of the parameters that it is to be written to
  template <typename T>
  void add(const char* name, T* const& pointer, int64_t elements) {
    wanted_.push_back({name, elements * static_cast<int64_t>(sizeof(T)), false, place_of(pointer)});
  }
  void add_kept_zero(const char* name, int* const& pointer) {
    wanted_.push_back({name, kKeptZero * sizeof(int), true, place_of(pointer)});
  }

  const std::vector<Workspace>& wanted() const { return wanted_; }

 private:
  template <typename T>
  size_t place_of(T* const& pointer) const {
    return reinterpret_cast<const char*>(&pointer) - params_;
  }

  const char* params_;
  std::vector<Workspace> wanted_;
};

// Launches with parameters that differ from those it was made of in their addresses alone.
using Launcher = std::function<void(const CallParams&, cudaStream_t)>;

struct Kernel {
  std::string_view operation, backend;  // "forward", "sm80"
  DType dtype, kv_dtype, out_dtype;     // of q; of k and v; of the result
  int headdim, headdim_v;               // the largest that it takes
  std::string_view features;            // name of its feature set
  uint32_t takes;                       // of Feature
  int tiles;                            // tile shapes that it is compiled with
  Launcher (*prepare)(CallParams&, Workspaces&);
};

// Row: Params, the parameters of the operation; kTakes; kTiles; prepare(params, workspaces), which
// may complete the parameters, asks for workspaces and returns what launches with them. It stands
// beside the kernel, in <backend>/<operation>_launch.cuh.
template <typename Row>
constexpr Kernel make_kernel(std::string_view operation, std::string_view backend, DType dtype,
                             DType kv_dtype, DType out_dtype, int headdim, int headdim_v,
                             std::string_view features) {
  using Params = typename Row::Params;
  return {operation,
          backend,
          dtype,
          kv_dtype,
          out_dtype,
          headdim,
          headdim_v,
          features,
          Row::kTakes,
          Row::kTiles,
          [](CallParams& params, Workspaces& workspaces) -> Launcher {
            return [launch = Row::prepare(static_cast<Params&>(params), workspaces)](
                       const CallParams& bound, cudaStream_t stream) {
              launch(static_cast<const Params&>(bound), stream);
            };
          }};
}

}  // namespace flash
