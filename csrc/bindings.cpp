// The Python module flash_attn._C: checks what it is given, fills the parameter structs,
// dispatches.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/cuda_check.h"
#include "dispatch.h"
#include "params.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace flash {
namespace {

// Makes a device current for one scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    changed_ = device != previous_;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

template <typename Range>
std::string join(const Range& values, int count) {
  std::ostringstream text;
  for (int i = 0; i < count; ++i) text << (i ? ", " : "(") << std::begin(values)[i];
  return text.str() + ")";
}

using Shape = std::initializer_list<int64_t>;

// What kernels require of a tensor. Users' mistakes are explained in Python (_arguments.py); these
// checks keep a mistake of the caller from becoming an illegal access. They throw what becomes
// ValueError.
[[noreturn]] void reject(const char* argument, const TensorView& tensor, const Shape& shape,
                         DType dtype, int device, const char* layout) {
  std::ostringstream message;
  message << argument << ": got shape " << join(tensor.size, tensor.ndim) << ", strides "
          << join(tensor.stride, tensor.ndim) << ", dtype " << name(tensor.dtype) << ", device "
          << tensor.device << ", address " << tensor.data << "; accepted: shape "
          << join(shape, shape.size()) << ", dtype " << name(dtype) << ", device " << device << ", "
          << layout;
  throw std::invalid_argument(message.str());
}

bool matches(const TensorView& tensor, const Shape& shape, DType dtype, int device) {
  return tensor.dtype == dtype && tensor.device == device &&
         std::equal(shape.begin(), shape.end(), tensor.size.begin(),
                    tensor.size.begin() + tensor.ndim);
}

// (batch, seqlen, nheads, headdim) of a 16-bit dtype.
void check_operand(const char* argument, const TensorView& tensor, const Shape& shape, DType dtype,
                   int device) {
  // Kernels move 16 bytes at a time.
  const bool valid = matches(tensor, shape, dtype, device) && tensor.stride[3] == 1 &&
                     (tensor.stride[0] | tensor.stride[1] | tensor.stride[2]) % 8 == 0 &&
                     reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
  if (!valid) {
    reject(argument, tensor, shape, dtype, device,
           "last stride 1, address and other strides multiples of 16 bytes");
  }
}

// (batch, nheads, seqlen_q), contiguous.
void check_lse(const char* argument, const TensorView& tensor, const Shape& shape, int device) {
  const bool valid = matches(tensor, shape, DType::kFloat32, device) && tensor.stride[2] == 1 &&
                     tensor.stride[1] == tensor.size[2] &&
                     tensor.stride[0] == tensor.size[1] * tensor.size[2];
  if (!valid) reject(argument, tensor, shape, DType::kFloat32, device, "contiguous");
}

void forward(std::string_view family, const TensorView& q, const TensorView& k, const TensorView& v,
             const TensorView& out, const TensorView& lse, float softmax_scale, int window_left,
             int window_right, uintptr_t stream) {
  const int64_t batch = q.size[0], seqlen_q = q.size[1], nheads = q.size[2], headdim = q.size[3];
  const int64_t seqlen_k = k.size[1], nheads_kv = k.size[2];
  check_operand("q", q, {batch, seqlen_q, nheads, headdim}, q.dtype, q.device);
  check_operand("k", k, {batch, seqlen_k, nheads_kv, headdim}, q.dtype, q.device);
  check_operand("v", v, {batch, seqlen_k, nheads_kv, headdim}, q.dtype, q.device);
  check_operand("out", out, {batch, seqlen_q, nheads, headdim}, q.dtype, q.device);
  check_lse("lse", lse, {batch, nheads, seqlen_q}, q.device);
  if (std::min({batch, seqlen_q, seqlen_k, nheads, nheads_kv}) < 1 || nheads % nheads_kv != 0 ||
      std::max({batch, seqlen_q, seqlen_k, nheads}) > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("q, k: got shapes " + join(q.size, 4) + " and " + join(k.size, 4) +
                                "; accepted: sizes from 1 to 2^31 - 1, nheads a multiple of "
                                "nheads_kv");
  }

  const ForwardLauncher launch = find_forward(family, q.dtype, headdim, FeatureSet::kPlain);
  if (q.device < 0) throw std::invalid_argument("q: on the CPU; accepted: a CUDA tensor");

  ForwardParams params{};
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.out = out.data;
  params.lse = static_cast<float*>(lse.data);
  params.q_batch_stride = q.stride[0];
  params.q_row_stride = q.stride[1];
  params.q_head_stride = q.stride[2];
  params.k_batch_stride = k.stride[0];
  params.k_row_stride = k.stride[1];
  params.k_head_stride = k.stride[2];
  params.v_batch_stride = v.stride[0];
  params.v_row_stride = v.stride[1];
  params.v_head_stride = v.stride[2];
  params.out_batch_stride = out.stride[0];
  params.out_row_stride = out.stride[1];
  params.out_head_stride = out.stride[2];
  params.batch = static_cast<int>(batch);
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.nheads = static_cast<int>(nheads);
  params.nheads_kv = static_cast<int>(nheads_kv);
  params.softmax_scale = softmax_scale;
  params.window_left = window_left;
  params.window_right = window_right;

  const DeviceGuard guard(q.device);
  launch(params, reinterpret_cast<cudaStream_t>(stream));
}

using InstantiationRow = std::tuple<std::string, std::string, int, std::string>;

std::vector<InstantiationRow> instantiation_rows() {
  std::vector<InstantiationRow> rows;
  for (const Instantiation& row : instantiations()) {
    rows.emplace_back(row.family, name(row.dtype), row.headdim, name(row.features));
  }
  return rows;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(_C, module) {
  using py::arg;
  module.doc() =
      "The compiled kernels of flash_attn. flash_attn/_backends/cuda.py is the only caller.";
  module.def("forward", &flash::forward, py::kw_only(), arg("family"), arg("q"), arg("k"), arg("v"),
             arg("out"), arg("lse"), arg("softmax_scale"), arg("window_left"), arg("window_right"),
             arg("stream"), py::call_guard<py::gil_scoped_release>(),
             "Launch attention on `stream`, a cudaStream_t as an integer; writes out and lse.");
  module.def("instantiations", &flash::instantiation_rows,
             "The kernels of this build: (family, dtype, headdim, feature set).");
}
