// The Python module flash_attn._C: checks what it is given, fills the parameter structs,
// dispatches.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "call_key.h"
#include "dispatch.h"
#include "host/cuda_check.h"
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
using OptionalTensor = std::optional<TensorView>;

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

// Checks tensors against the call's device and dtype and reads them.
class Reader {
 public:
  Reader(DType dtype, int device) : dtype_(dtype), device_(device) {}

  // (..., heads, dim): of the call's dtype, dense or packed.
  Operand operand(const char* argument, const TensorView& tensor, const Shape& shape) {
    const int last = tensor.ndim - 1;
    if (!matches(tensor, shape, dtype_, device_) ||
        (tensor.stride[last] != 1 && tensor.size[last] != 1)) {
      reject(argument, tensor, shape, dtype_, device_, "last stride 1");
    }
    const int64_t batch_stride = tensor.ndim == 4 ? tensor.stride[0] : 0;
    const int64_t row_stride = tensor.stride[last - 2], head_stride = tensor.stride[last - 1];
    aligned_ = aligned_ && (batch_stride | row_stride | head_stride | tensor.size[last]) % 8 == 0 &&
               reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
    return {tensor.data, batch_stride, row_stride, head_stride};
  }

  // The rows and heads of `like` with another last dimension.
  Operand operand_like(const char* argument, const TensorView& tensor, const TensorView& like,
                       int64_t dim) {
    const auto& size = like.size;
    return like.ndim == 4 ? operand(argument, tensor, {size[0], size[1], size[2], dim})
                          : operand(argument, tensor, {size[0], size[1], dim});
  }

  template <typename T>
  T* contiguous(const char* argument, const TensorView& tensor, const Shape& shape,
                DType dtype) const {
    int64_t stride = 1;
    bool valid = matches(tensor, shape, dtype, device_);
    for (int i = tensor.ndim - 1; valid && i >= 0; --i) {
      valid = tensor.stride[i] == stride || tensor.size[i] == 1;
      stride *= tensor.size[i];
    }
    if (!valid) reject(argument, tensor, shape, dtype, device_, "contiguous");
    return static_cast<T*>(tensor.data);
  }

  template <typename T>
  T* contiguous(const char* argument, const OptionalTensor& tensor, const Shape& shape,
                DType dtype) const {
    return tensor ? contiguous<T>(argument, *tensor, shape, dtype) : nullptr;
  }

  // Whether every operand so far can be moved 16 bytes at a time.
  bool aligned() const { return aligned_; }

 private:
  const DType dtype_;
  const int device_;
  bool aligned_ = true;
};

// The arguments that forward and backward share, as Python passes them: see `define`.
struct CommonArguments {
  std::string_view family;
  int kernel_headdim, kernel_headdim_v;
  const TensorView &q, &k, &v;
  const OptionalTensor &cu_seqlens_q, &cu_seqlens_k, &seqused_k, &leftpad_k;
  int64_t max_seqlen_q, max_seqlen_k;
  float softmax_scale;
  int window_left, window_right;
  float softcap;
  const OptionalTensor& alibi_slopes;
  double dropout_p;
  const OptionalTensor& rng_state;
  int shared_memory;
  uintptr_t stream;
};

int to_int(const char* what, int64_t value) {
  if (value < 1 || value > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::string(what) + ": got " + std::to_string(value) +
                                "; accepted: from 1 to 2^31 - 1");
  }
  return static_cast<int>(value);
}

void read_common(const CommonArguments& a, const TensorView& lse,
                 const OptionalTensor& cache_batch_idx, const OptionalTensor& block_table,
                 Reader& reader, AttentionParams& params) {
  const TensorView &q = a.q, &k = a.k;
  const bool packed_q = a.cu_seqlens_q.has_value(), packed_k = a.cu_seqlens_k.has_value();
  if (q.device < 0) throw std::invalid_argument("q: on the CPU; accepted: a CUDA tensor");
  if (q.ndim != (packed_q ? 3 : 4) || k.ndim != (packed_k ? 3 : 4) || a.v.ndim != k.ndim) {
    throw std::invalid_argument("q, k, v: got shapes " + join(q.size, q.ndim) + ", " +
                                join(k.size, k.ndim) + " and " + join(a.v.size, a.v.ndim) +
                                "; accepted: 3 dimensions where packed (cu_seqlens), else 4");
  }
  const int64_t nheads = q.size[q.ndim - 2], headdim = q.size[q.ndim - 1];
  const int64_t nheads_kv = k.size[k.ndim - 2], headdim_v = a.v.size[a.v.ndim - 1];
  params.batch = to_int("batch", packed_q ? a.cu_seqlens_q->size[0] - 1 : q.size[0]);
  params.nheads = to_int("nheads", nheads);
  params.nheads_kv = to_int("nheads_kv", nheads_kv);
  params.headdim = to_int("headdim", headdim);
  params.headdim_v = to_int("headdim_v", headdim_v);
  params.total_q = to_int("rows of q", packed_q ? q.size[0] : q.size[1]);
  params.total_k = to_int("rows of k", packed_k ? k.size[0] : k.size[1]);
  params.seqlen_q = to_int("max_seqlen_q", packed_q ? a.max_seqlen_q : q.size[1]);
  const int64_t pages = block_table ? block_table->size[1] : 1;  // of a sequence
  params.seqlen_k = to_int("max_seqlen_k", packed_k ? a.max_seqlen_k : k.size[1] * pages);
  params.slots_k = packed_k ? 1 : to_int("batch of k", k.size[0]);
  if (nheads % nheads_kv != 0) {
    throw std::invalid_argument("nheads: got " + std::to_string(nheads) + " and nheads_kv " +
                                std::to_string(nheads_kv) + "; accepted: a multiple of nheads_kv");
  }
  if (!packed_k && !cache_batch_idx && !block_table && params.slots_k != params.batch) {
    throw std::invalid_argument("k: got a batch of " + std::to_string(params.slots_k) +
                                "; accepted: that of q, " + std::to_string(params.batch));
  }

  const int64_t batch = params.batch;
  params.q = packed_q ? reader.operand("q", q, {q.size[0], nheads, headdim})
                      : reader.operand("q", q, {batch, q.size[1], nheads, headdim});
  if (packed_k) {
    params.k = reader.operand("k", k, {k.size[0], nheads_kv, headdim});
    params.v = reader.operand("v", a.v, {k.size[0], nheads_kv, headdim_v});
  } else {
    params.k = reader.operand("k", k, {k.size[0], k.size[1], nheads_kv, headdim});
    params.v = reader.operand("v", a.v, {k.size[0], k.size[1], nheads_kv, headdim_v});
  }
  params.lse =
      packed_q ? reader.contiguous<float>("lse", lse, {nheads, q.size[0]}, DType::kFloat32)
               : reader.contiguous<float>("lse", lse, {batch, nheads, q.size[1]}, DType::kFloat32);
  params.lse_head_stride = params.total_q;
  params.lse_batch_stride = packed_q ? 0 : nheads * params.lse_head_stride;

  const auto int32 = [&](const char* argument, const OptionalTensor& tensor, int64_t size) {
    return reader.contiguous<const int>(argument, tensor, {size}, DType::kInt32);
  };
  params.cu_seqlens_q = int32("cu_seqlens_q", a.cu_seqlens_q, batch + 1);
  params.cu_seqlens_k = int32("cu_seqlens_k", a.cu_seqlens_k, batch + 1);
  params.seqused_k = int32("seqused_k", a.seqused_k, batch);
  params.leftpad_k = int32("leftpad_k", a.leftpad_k, batch);
  params.cache_batch_idx = int32("cache_batch_idx", cache_batch_idx, batch);

  params.softmax_scale = a.softmax_scale;
  params.window_left = a.window_left;
  params.window_right = a.window_right;
  params.softcap = a.softcap;
  if (a.alibi_slopes) {
    const bool per_batch = a.alibi_slopes->ndim == 2;
    params.alibi_slopes = per_batch
                              ? reader.contiguous<const float>("alibi_slopes", *a.alibi_slopes,
                                                               {batch, nheads}, DType::kFloat32)
                              : reader.contiguous<const float>("alibi_slopes", *a.alibi_slopes,
                                                               {nheads}, DType::kFloat32);
    params.alibi_batch_stride = per_batch ? nheads : 0;
  }
  // Of 16 random bits those below the threshold drop. At threshold 0 nothing is dropped.
  const double threshold = std::nearbyint(a.dropout_p * 65536.0);
  if (a.rng_state && threshold >= 1) {
    params.rng_state =
        reader.contiguous<const int64_t>("rng_state", *a.rng_state, {2}, DType::kInt64);
    params.dropout_bound = static_cast<uint32_t>(threshold * 65536.0 - 1);
    params.dropout_scale = static_cast<float>(1.0 / (1.0 - a.dropout_p));
  }

  const DeviceGuard guard(q.device);
  params.shared_memory = a.shared_memory > 0 ? a.shared_memory : max_shared_memory(q.device);
}

FeatureSet feature_set(const AttentionParams& params) {
  const bool full = params.softcap > 0 || params.alibi_slopes != nullptr ||
                    params.rng_state != nullptr || !params.aligned;
  return full ? FeatureSet::kFull : FeatureSet::kPlain;
}

void forward(const CommonArguments& a, const TensorView& out, const TensorView& lse,
             const OptionalTensor& cache_batch_idx, const OptionalTensor& s_aux,
             const OptionalTensor& block_table, const OptionalTensor& tile_counter) {
  ForwardParams params{};
  Reader reader(a.q.dtype, a.q.device);
  read_common(a, lse, cache_batch_idx, block_table, reader, params);
  params.out = reader.operand_like("out", out, a.q, params.headdim_v);
  const bool sm90 = a.family == "sm90";
  if (block_table && !sm90) {
    throw std::invalid_argument("block_table: got a tensor; accepted by the sm90 kernels alone");
  }
  if (sm90 && !tile_counter) {
    throw std::invalid_argument("tile_counter: got None; the sm90 kernels need a tensor");
  }
  if (block_table) {
    params.block_table = reader.contiguous<const int>(
        "block_table", *block_table, {params.batch, block_table->size[1]}, DType::kInt32);
    params.block_table_stride = block_table->size[1];
    params.page_size = to_int("page size", a.k.size[1]);
  }
  params.tile_counter = reader.contiguous<int>("tile_counter", tile_counter, {1}, DType::kInt32);
  params.s_aux = reader.contiguous<const float>("s_aux", s_aux, {params.nheads}, DType::kFloat32);
  params.aligned = reader.aligned();

  const auto launch = find_forward(
      {a.family, a.q.dtype, a.kernel_headdim, a.kernel_headdim_v, feature_set(params)}, params);
  const DeviceGuard guard(a.q.device);
  launch(params, reinterpret_cast<cudaStream_t>(a.stream));
}

void backward(const CommonArguments& a, const TensorView& dout, const TensorView& out,
              const TensorView& lse, const OptionalTensor& dlse, const TensorView& delta,
              const TensorView& dq, const TensorView& dk, const TensorView& dv,
              const TensorView& dq_accum, const OptionalTensor& dq_turn) {
  BackwardParams params{};
  Reader reader(a.q.dtype, a.q.device);
  read_common(a, lse, std::nullopt, std::nullopt, reader, params);
  params.out = reader.operand_like("out", out, a.q, params.headdim_v);
  params.dout = reader.operand_like("dout", dout, a.q, params.headdim_v);
  params.dq = reader.operand_like("dq", dq, a.q, params.headdim);
  params.dk = reader.operand_like("dk", dk, a.k, params.headdim);
  params.dv = reader.operand_like("dv", dv, a.k, params.headdim_v);
  params.aligned = reader.aligned();
  const auto like_lse = [&](const char* argument, const OptionalTensor& tensor) {
    return lse.ndim == 3
               ? reader.contiguous<float>(argument, tensor, {lse.size[0], lse.size[1], lse.size[2]},
                                          DType::kFloat32)
               : reader.contiguous<float>(argument, tensor, {lse.size[0], lse.size[1]},
                                          DType::kFloat32);
  };
  params.dlse = like_lse("dlse", dlse);
  params.delta = like_lse("delta", delta);
  const int64_t rows = a.cu_seqlens_q ? params.total_q / 16 + params.batch
                                      : params.batch * ((params.seqlen_q + int64_t{15}) / 16);
  params.row_tiles = to_int("row tiles", rows);
  to_int("row tiles of all heads", params.nheads * rows);
  params.dq_accum = reader.contiguous<float>(
      "dq_accum", dq_accum, {params.nheads, rows, 16 * int64_t{a.kernel_headdim}}, DType::kFloat32);
  params.dq_turn = reader.contiguous<int>("dq_turn", dq_turn, {params.nheads, rows}, DType::kInt32);

  const auto launch = find_backward(
      {a.family, a.q.dtype, a.kernel_headdim, a.kernel_headdim_v, feature_set(params)}, params);
  const DeviceGuard guard(a.q.device);
  launch(params, reinterpret_cast<cudaStream_t>(a.stream));
}

// Makes `function` one of the module's. Its arguments are the common ones, then `rest`; positions
// are faster than names.
template <typename... Rest, typename... Args>
void define(py::module_& module, const char* name,
            void (*function)(const CommonArguments&, Rest...), const char* doc,
            Args... rest_names) {
  using py::arg;
  module.def(
      name,
      [function](std::string_view family, int kernel_headdim, int kernel_headdim_v,
                 const TensorView& q, const TensorView& k, const TensorView& v,
                 const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                 const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
                 int64_t max_seqlen_q, int64_t max_seqlen_k, float softmax_scale, int window_left,
                 int window_right, float softcap, const OptionalTensor& alibi_slopes,
                 double dropout_p, const OptionalTensor& rng_state, int shared_memory,
                 uintptr_t stream, Rest... rest) {
        function({family,
                  kernel_headdim,
                  kernel_headdim_v,
                  q,
                  k,
                  v,
                  cu_seqlens_q,
                  cu_seqlens_k,
                  seqused_k,
                  leftpad_k,
                  max_seqlen_q,
                  max_seqlen_k,
                  softmax_scale,
                  window_left,
                  window_right,
                  softcap,
                  alibi_slopes,
                  dropout_p,
                  rng_state,
                  shared_memory,
                  stream},
                 rest...);
      },
      arg("family"), arg("kernel_headdim"), arg("kernel_headdim_v"), arg("q"), arg("k"), arg("v"),
      arg("cu_seqlens_q"), arg("cu_seqlens_k"), arg("seqused_k"), arg("leftpad_k"),
      arg("max_seqlen_q"), arg("max_seqlen_k"), arg("softmax_scale"), arg("window_left"),
      arg("window_right"), arg("softcap"), arg("alibi_slopes"), arg("dropout_p"), arg("rng_state"),
      arg("shared_memory"), arg("stream"), rest_names..., py::call_guard<py::gil_scoped_release>(),
      doc);
}

// Identifies a stream for the life of the process; a handle may be another stream's later, or mean
// each thread's own.
unsigned long long stream_id(uintptr_t stream) {
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(reinterpret_cast<cudaStream_t>(stream), &id), "cudaStreamGetId");
  return id;
}

using InstantiationRow = std::tuple<std::string, std::string, std::string, int, int, std::string>;

std::vector<InstantiationRow> instantiation_rows() {
  std::vector<InstantiationRow> rows;
  for (const auto& [pass, key] : instantiations()) {
    rows.emplace_back(key.family, pass, name(key.dtype), key.headdim, key.headdim_v,
                      name(key.features));
  }
  return rows;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(_C, module) {
  using py::arg;
  module.doc() =
      "The compiled kernels of flash_attn. flash_attn/_backends/cuda.py is the only caller.";
  flash::define(module, "forward", &flash::forward,
                "Launch attention on `stream`, a cudaStream_t as an integer; writes out and lse. "
                "shared_memory: bytes of a thread block, 0: what the device has.",
                arg("out"), arg("lse"), arg("cache_batch_idx"), arg("s_aux"), arg("block_table"),
                arg("tile_counter"));
  flash::define(module, "backward", &flash::backward,
                "Launch its backward; writes delta, dq, dk and dv. dq_accum and dq_turn (None: any "
                "order) are zero at the start.",
                arg("dout"), arg("out"), arg("lse"), arg("dlse"), arg("delta"), arg("dq"),
                arg("dk"), arg("dv"), arg("dq_accum"), arg("dq_turn"));
  module.def(
      "call_key", &flash::call_key,
      "What a call of q, k, v and these numbers depends on, but for the addresses and values "
      "of its tensors, as bytes; None if q, k or v is not a plain CUDA tensor, or the rest "
      "not numbers of Python or None.");
  module.def("stream_id", &flash::stream_id, arg("stream"),
             "What no other stream of this process is ever called. stream: a cudaStream_t.");
  module.def("instantiations", &flash::instantiation_rows,
             "The kernels of this build: (family, pass, dtype, headdim, headdim_v, feature set).");
}
