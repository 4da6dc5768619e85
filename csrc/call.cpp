#include "call.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "host/cuda_check.h"
#include "host/driver.h"
#include "kernels.h"

namespace flash {
namespace {

// Makes a device current for one scope, and gives the thread a context if it has none.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    changed_ = device != previous_;
    if (changed_ || !has_context()) check_cuda(cudaSetDevice(device), "cudaSetDevice");
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

// Bytes of shared memory that one thread block of the device may use.
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

// Held while a call launches: a kernel that draws tickets before the kernels in front of it have
// ended (TileScheduler::begin) knows those of its own call alone. Streams share none, as a launch
// to a stream that is full waits. None is destroyed: a thread may launch while the process exits.
std::mutex& launching(int device, cudaStream_t stream) {
  static std::mutex finding;
  static auto& of_streams = *new std::map<std::pair<int, cudaStream_t>, std::mutex>;
  const std::lock_guard<std::mutex> lock(finding);
  return of_streams[{device, stream}];
}

template <typename Range>
std::string join(const Range& values, int count) {
  std::ostringstream text;
  for (int i = 0; i < count; ++i) text << (i ? ", " : "(") << std::begin(values)[i];
  return text.str() + ")";
}

int to_int(const char* what, int64_t value, int64_t most, const char* accepted) {
  if (value < 1 || value > most) {
    throw std::invalid_argument(std::string(what) + ": got " + std::to_string(value) +
                                "; accepted: " + accepted);
  }
  return static_cast<int>(value);
}

int to_int(const char* what, int64_t value) {
  return to_int(what, value, std::numeric_limits<int>::max(), "from 1 to 2^31 - 1");
}

// Kernels add numbers of queries, of keys and of a step of keys.
int to_length(const char* what, int64_t value) {
  return to_int(what, value, int64_t{1} << 30, "from 1 to 2^30");
}

using Shape = std::vector<int64_t>;

// Reads the tensors of a call into its parameters and remembers where their addresses go.
class Reader {
 public:
  // first: the tensor whose device the others must be on
  Reader(const Kernel& kernel, const Tensors& tensors, const Numbers& numbers, CallParams& params,
         const char* first)
      : kernel_(kernel),
        tensors_(tensors),
        numbers_(numbers),
        params_(params),
        device_(get(first).device) {
    if (device_ < 0) {
      throw std::invalid_argument(std::string(first) + ": on the CPU; accepted: a CUDA tensor");
    }
  }

  const Kernel& kernel() const { return kernel_; }
  const Numbers& numbers() const { return numbers_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }

  double number(const std::string& name) const {
    const auto found = numbers_.find(name);
    if (found == numbers_.end()) throw std::invalid_argument(name + ": missing");
    return found->second;
  }

  // A whole number. A double may be anything: NaN, infinite, more than an integer holds.
  int64_t integer(const std::string& name, int64_t most = int64_t{1} << 53) const {
    const double value = number(name);
    if (!(std::fabs(value) <= static_cast<double>(most))) {
      throw std::invalid_argument(name + ": got " + std::to_string(value) +
                                  "; accepted: whole numbers up to " + std::to_string(most));
    }
    return static_cast<int64_t>(value);
  }
  int small_integer(const std::string& name) const {
    return static_cast<int>(integer(name, std::numeric_limits<int>::max()));
  }

  const TensorView& get(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::invalid_argument(name + ": missing");
    return found->second;
  }

  // (..., heads, dim), dense or packed; its last dimension is contiguous.
  void operand(const std::string& name, Operand& target, const Shape& shape, DType dtype) {
    const TensorView& tensor = get(name);
    const int last = tensor.ndim - 1;
    if (!matches(tensor, shape, dtype) || (tensor.stride[last] != 1 && tensor.size[last] != 1)) {
      reject(name, tensor, shape, dtype, "last stride 1");
    }
    const int64_t batch_stride = tensor.ndim == 4 ? tensor.stride[0] : 0;
    const int64_t row_stride = tensor.stride[last - 2], head_stride = tensor.stride[last - 1];
    const int64_t any = batch_stride | row_stride | head_stride | tensor.size[last];
    aligned_ = aligned_ && any % 16 * size_of(dtype) % 16 == 0 &&
               reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
    target = {tensor.data, batch_stride, row_stride, head_stride};
    bind(name, target.data, tensor);
  }

  // Values in e4m3 as the quantised forward takes them, heads outside of rows.
  void transposed(const std::string& name, Operand& target, const Shape& shape) {
    const TensorView& tensor = get(name);
    const int last = tensor.ndim - 1;
    if (!matches(tensor, shape, DType::kFloat8E4M3) || tensor.stride[last] != 1 ||
        (tensor.stride[last - 1] | tensor.stride[last - 2]) % 16 != 0 ||
        reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0) {
      reject(name, tensor, shape, DType::kFloat8E4M3, "last stride 1, 16-byte alignment");
    }
    const int64_t batch_stride = tensor.ndim == 4 ? tensor.stride[0] : 0;
    target = {tensor.data, batch_stride, tensor.stride[last - 1], tensor.stride[last - 2]};
    bind(name, target.data, tensor);
  }

  // Null if there is none.
  template <typename T>
  void contiguous(const std::string& name, T*& target, const Shape& shape, DType dtype) {
    if (!has(name)) return;
    const TensorView& tensor = get(name);
    int64_t stride = 1;
    bool valid = matches(tensor, shape, dtype);
    for (int i = tensor.ndim - 1; valid && i >= 0; --i) {
      valid = tensor.stride[i] == stride || tensor.size[i] == 1;
      stride *= tensor.size[i];
    }
    if (!valid) reject(name, tensor, shape, dtype, "contiguous");
    bind(name, target, tensor);
  }

  // (batch, nheads_kv) at any strides; null if there is none.
  void descale(const std::string& name, Descale& target, const Shape& shape) {
    if (!has(name)) return;
    const TensorView& tensor = get(name);
    if (!matches(tensor, shape, DType::kFloat32)) {
      reject(name, tensor, shape, DType::kFloat32, "any strides");
    }
    target.batch_stride = tensor.stride[0];
    target.head_stride = tensor.stride[1];
    bind(name, target.data, tensor);
  }

  // (batch, heads, rows), of which the last is contiguous.
  template <typename T>
  void row_values(const std::string& name, RowValues<T>& target, const Shape& shape) {
    const TensorView& tensor = get(name);
    if (!matches(tensor, shape, DType::kFloat32) || (tensor.stride[2] != 1 && shape[2] != 1)) {
      reject(name, tensor, shape, DType::kFloat32, "last stride 1");
    }
    target.batch_stride = tensor.stride[0];
    target.head_stride = tensor.stride[1];
    bind(name, target.data, tensor);
  }

  void require_alignment(const std::string& name) {
    aligned_ = aligned_ && reinterpret_cast<uintptr_t>(get(name).data) % 16 == 0;
  }

  // Whether every operand so far can be moved 16 bytes at a time.
  bool aligned() const { return aligned_; }
  int device() const { return device_; }

  // The tensors read, and where their addresses go in the parameters.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<size_t>& places() const { return places_; }

  void check_all_read() const {
    for (const auto& [name, tensor] : tensors_) {
      if (std::find(names_.begin(), names_.end(), name) == names_.end()) {
        throw std::invalid_argument(name + ": got a tensor; accepted by the " +
                                    std::string(kernel_.operation) + ": None");
      }
    }
  }

 private:
  template <typename T>
  void bind(const std::string& name, T*& target, const TensorView& tensor) {
    target = static_cast<T*>(tensor.data);
    names_.push_back(name);
    places_.push_back(reinterpret_cast<char*>(&target) - reinterpret_cast<char*>(&params_));
  }

  bool matches(const TensorView& tensor, const Shape& shape, DType dtype) const {
    return tensor.dtype == dtype && tensor.device == device_ &&
           std::equal(shape.begin(), shape.end(), tensor.size.begin(),
                      tensor.size.begin() + tensor.ndim);
  }

  [[noreturn]] void reject(const std::string& name, const TensorView& tensor, const Shape& shape,
                           DType dtype, const char* layout) const {
    std::ostringstream message;
    message << name << ": got shape " << join(tensor.size, tensor.ndim) << ", strides "
            << join(tensor.stride, tensor.ndim) << ", dtype " << flash::name(tensor.dtype)
            << ", device " << tensor.device << ", address " << tensor.data << "; accepted: shape "
            << join(shape, static_cast<int>(shape.size())) << ", dtype " << flash::name(dtype)
            << ", device " << device_ << ", " << layout;
    throw std::invalid_argument(message.str());
  }

  const Kernel& kernel_;
  const Tensors& tensors_;
  const Numbers& numbers_;
  CallParams& params_;
  const int device_;
  bool aligned_ = true;
  std::vector<std::string> names_;
  std::vector<size_t> places_;
};

// The rows and heads of a tensor, with another last dimension.
Shape rows_of(const TensorView& tensor, int64_t dim) {
  Shape shape(tensor.size.begin(), tensor.size.begin() + tensor.ndim);
  shape.back() = dim;
  return shape;
}

Shape lse_shape(const AttentionParams& params) {
  return params.lse_batch_stride == 0 ? Shape{params.nheads, params.total_q}
                                      : Shape{params.batch, params.nheads, params.total_q};
}

// Blocks of keys that have scales: of a dense sequence, or of all packed ones.
int64_t scaled_blocks(bool packed, int64_t seqlen_k, int64_t total_k, int64_t batch) {
  return packed ? total_k / kScaledKeys + batch : (seqlen_k + kScaledKeys - 1) / kScaledKeys;
}

// Of transposed values, (batch, nheads_kv, headdim_v, places) or (nheads_kv, headdim_v, places).
Shape values_shape(bool packed, int64_t batch, int64_t nheads_kv, int64_t headdim_v,
                   int64_t blocks) {
  const int64_t places = blocks * kScaledKeys;
  return packed ? Shape{nheads_kv, headdim_v, places} : Shape{batch, nheads_kv, headdim_v, places};
}

void read_values(Reader& reader, QuantisedParams& params, bool packed) {
  const int64_t blocks = scaled_blocks(packed, params.seqlen_k, params.total_k, params.batch);
  params.places_v = to_int("places of keys", blocks * kScaledKeys);
  reader.transposed("v", params.v,
                    values_shape(packed, params.batch, params.nheads_kv, params.headdim_v, blocks));
}

// Of values like k; params.v is where their transpose goes.
void read_raw_values(Reader& reader, const Shape& shape, QuantisedParams& params, bool packed) {
  reader.operand("v", params.raw_v, shape, reader.kernel().kv_dtype);
  const int64_t blocks = scaled_blocks(packed, params.seqlen_k, params.total_k, params.batch);
  params.places_v = to_int("places of keys", blocks * kScaledKeys);
  const int64_t row = params.places_v, head = params.headdim_v * row;
  params.v = {params.raw_v.data, packed ? 0 : params.nheads_kv * head, row, head};
}

// (batch, heads, entries) or, packed, (heads, entries).
void read_scales(Reader& reader, const char* name, Scales& scales, bool packed, int64_t batch,
                 int64_t heads, int64_t entries) {
  scales.head_stride = entries;
  scales.batch_stride = packed ? 0 : heads * entries;
  reader.contiguous(name, scales.data,
                    packed ? Shape{heads, entries} : Shape{batch, heads, entries}, DType::kFloat32);
}

template <typename Params>
void read_common(Reader& reader, Params& params) {
  const Kernel& kernel = reader.kernel();
  const TensorView &q = reader.get("q"), &k = reader.get("k"), &v = reader.get("v");
  const bool packed_q = reader.has("cu_seqlens_q"), packed_k = reader.has("cu_seqlens_k");
  if (q.ndim != (packed_q ? 3 : 4) || k.ndim != (packed_k ? 3 : 4) || v.ndim != k.ndim) {
    throw std::invalid_argument("q, k, v: got shapes " + join(q.size, q.ndim) + ", " +
                                join(k.size, k.ndim) + " and " + join(v.size, v.ndim) +
                                "; accepted: 3 dimensions where packed (cu_seqlens), else 4");
  }
  // Values with scales are transposed: (..., nheads_kv, headdim_v, places).
  constexpr bool kQuantised = std::is_same_v<Params, QuantisedParams>;
  const bool transposed = kQuantised && reader.has("v_scale");
  const bool rounds = kQuantised && reader.has("k_scale");  // queries, of 16 bits, unlike k
  const int64_t nheads = q.size[q.ndim - 2], headdim_q = q.size[q.ndim - 1];
  const int64_t headdim = rounds ? k.size[k.ndim - 1] : headdim_q;
  const int64_t nheads_kv = k.size[k.ndim - 2], headdim_v = v.size[v.ndim - (transposed ? 2 : 1)];
  params.batch = to_int("batch", packed_q ? reader.get("cu_seqlens_q").size[0] - 1 : q.size[0]);
  params.nheads = to_int("nheads", nheads);
  params.nheads_kv = to_int("nheads_kv", nheads_kv);
  params.headdim = to_int("headdim", headdim);
  params.headdim_v = to_int("headdim_v", headdim_v);
  params.total_q = to_length("rows of q", packed_q ? q.size[0] : q.size[1]);
  params.total_k = to_length("rows of k", packed_k ? k.size[0] : k.size[1]);
  params.seqlen_q =
      to_length("max_seqlen_q", packed_q ? reader.integer("max_seqlen_q") : q.size[1]);
  const int64_t pages = reader.has("block_table") ? reader.get("block_table").size[1] : 1;
  params.seqlen_k =
      to_length("max_seqlen_k", packed_k ? reader.integer("max_seqlen_k") : k.size[1] * pages);
  params.slots_k = packed_k ? 1 : to_int("batch of k", k.size[0]);
  if (nheads % nheads_kv != 0) {
    throw std::invalid_argument("nheads: got " + std::to_string(nheads) + " and nheads_kv " +
                                std::to_string(nheads_kv) + "; accepted: a multiple of nheads_kv");
  }
  if (!packed_k && !reader.has("cache_batch_idx") && !reader.has("block_table") &&
      params.slots_k != params.batch) {
    throw std::invalid_argument("k: got a batch of " + std::to_string(params.slots_k) +
                                "; accepted: that of q, " + std::to_string(params.batch));
  }

  const int64_t batch = params.batch;
  Shape k_shape = rows_of(k, headdim);
  k_shape[k.ndim - 2] = nheads_kv;
  Shape v_shape = k_shape;
  v_shape.back() = headdim_v;
  reader.operand("q", params.q, rows_of(q, headdim_q), rounds ? kernel.out_dtype : kernel.dtype);
  reader.operand("k", params.k, k_shape, kernel.kv_dtype);
  if constexpr (kQuantised) {
    params.headdim_q = to_int("head dimension of q", headdim_q);
    if (headdim_q > headdim) {
      throw std::invalid_argument("q: got a head dimension of " + std::to_string(headdim_q) +
                                  "; accepted: up to that of k, " + std::to_string(headdim));
    }
    if (transposed) {
      read_values(reader, params, packed_k);
    } else if (kernel.kv_dtype == DType::kInt8) {
      reader.operand("v", params.v, v_shape, kernel.out_dtype);
    } else {
      read_raw_values(reader, v_shape, params, packed_k);
    }
  } else {
    reader.operand("v", params.v, v_shape, kernel.kv_dtype);
  }
  reader.operand("out", params.out, rows_of(q, headdim_v), kernel.out_dtype);
  params.lse_head_stride = params.total_q;
  params.lse_batch_stride = packed_q ? 0 : nheads * params.lse_head_stride;
  reader.contiguous("lse", params.lse, lse_shape(params), DType::kFloat32);

  const auto int32 = [&](const char* argument, const int*& target, int64_t size) {
    reader.contiguous(argument, target, {size}, DType::kInt32);
  };
  int32("cu_seqlens_q", params.cu_seqlens_q, batch + 1);
  int32("cu_seqlens_k", params.cu_seqlens_k, batch + 1);
  int32("seqused_k", params.seqused_k, batch);
  int32("leftpad_k", params.leftpad_k, batch);
  int32("cache_batch_idx", params.cache_batch_idx, batch);

  visit_numbers(params, [&](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, int>) {
      field = reader.small_integer(name);
    } else {
      field = static_cast<Field>(reader.number(name));
    }
  });
  if (reader.has("alibi_slopes")) {
    const bool per_batch = reader.get("alibi_slopes").ndim == 2;
    reader.contiguous("alibi_slopes", params.alibi_slopes,
                      per_batch ? Shape{batch, nheads} : Shape{nheads}, DType::kFloat32);
    params.alibi_batch_stride = per_batch ? nheads : 0;
  }
  params.dropout_scale = 1.f;
  if (reader.has("rng_state")) {
    const double dropout_p = reader.number("dropout_p");
    reader.contiguous("rng_state", params.rng_state, {2}, DType::kInt64);
    params.dropout_threshold = DropoutThreshold::of(dropout_p);
    params.dropout_scale = static_cast<float>(1.0 / (1.0 - dropout_p));
  }
}

// What follows from all that was read of an attention; and whether the kernel takes it.
void complete(const Reader& reader, AttentionParams& params) {
  params.aligned = reader.aligned();
  if (params.shared_memory == 0) params.shared_memory = max_shared_memory(reader.device());
  const Kernel& kernel = reader.kernel();
  const Numbers& numbers = reader.numbers();
  if (params.headdim > kernel.headdim || params.headdim_v > kernel.headdim_v) {
    throw std::invalid_argument("kernel: got " + describe(kernel) + " for head dimensions " +
                                std::to_string(params.headdim) + " and " +
                                std::to_string(params.headdim_v));
  }
  if (params.tile < -1 || params.tile >= kernel.tiles) {
    throw std::invalid_argument("tile: got " + std::to_string(params.tile) + "; accepted by " +
                                describe(kernel) + ": from -1 to " +
                                std::to_string(kernel.tiles - 1));
  }
  for (const auto& [feature, name, argument] : kFeatureNames) {
    const auto number = numbers.find(argument);
    const bool asked = feature == kAnyAlignment  ? !params.aligned
                       : number != numbers.end() ? number->second != 0
                                                 : reader.has(argument);
    if (asked && !(kernel.takes & feature)) {
      throw std::invalid_argument("kernel: got " + describe(kernel) + ", which has no " + name +
                                  ", for a call that asks for it");
    }
  }
}

template <typename Params>
void read_pages(Reader& reader, Params& params) {
  if (!reader.has("block_table")) return;
  if (reader.has("cu_seqlens_k")) {
    throw std::invalid_argument("block_table: got cu_seqlens_k beside it; accepted: lengths_k");
  }
  const int64_t pages = reader.get("block_table").size[1];
  reader.contiguous("block_table", params.block_table, {params.batch, pages}, DType::kInt32);
  params.block_table_stride = pages;
  params.page_size = to_int("page size", reader.get("k").size[1]);
}

template <typename Params>
void read_descales(Reader& reader, Params& params) {
  reader.descale("k_descale", params.k_descale, {params.batch, params.nheads_kv});
  reader.descale("v_descale", params.v_descale, {params.batch, params.nheads_kv});
}

void read(Reader& reader, ForwardParams& params) {
  read_common(reader, params);
  read_pages(reader, params);
  reader.contiguous("lengths_k", params.lengths_k, {int64_t{params.batch} + 1}, DType::kInt32);
  params.longest_k = to_length("max_seqlen_k", reader.integer("max_seqlen_k"));
  reader.contiguous("s_aux", params.s_aux, {params.nheads}, DType::kFloat32);
  reader.contiguous("seqused_before", params.seqused_before, {params.batch}, DType::kInt32);
  read_descales(reader, params);
  complete(reader, params);
}

void read(Reader& reader, QuantisedParams& params) {
  read_common(reader, params);
  const bool packed_k = reader.has("cu_seqlens_k");
  reader.contiguous("s_aux", params.s_aux, {params.nheads}, DType::kFloat32);
  const int64_t batch = params.batch;
  const int64_t blocks = scaled_blocks(packed_k, params.seqlen_k, params.total_k, batch);
  read_scales(reader, "k_scale", params.k_scale, packed_k, batch, params.nheads_kv, blocks);
  read_scales(reader, "v_scale", params.v_scale, packed_k, batch, params.nheads_kv, blocks);
  read_descales(reader, params);
  reader.descale("q_descale", params.q_descale, {batch, params.nheads_kv});
  if (params.leftpad_k != nullptr || params.cache_batch_idx != nullptr) {
    throw std::invalid_argument("leftpad_k, cache_batch_idx: accepted by the quantised: None");
  }
  complete(reader, params);
}

// tokens: the tensor that is rotated
void read_rotation(Reader& reader, const TensorView& tokens, Rotation& rotation) {
  if (!reader.has("rotary_cos")) return;
  const TensorView& cos = reader.get("rotary_cos");
  const int64_t positions = cos.size[0], pairs = cos.ndim == 2 ? cos.size[1] : 0;
  rotation.positions = to_int("rows of rotary_cos", positions);
  rotation.pairs = to_int("columns of rotary_cos", pairs);
  if (2 * pairs > tokens.size[tokens.ndim - 1]) {
    throw std::invalid_argument("rotary_cos: got " + std::to_string(pairs) +
                                " columns; accepted: at most half of the head dimension");
  }
  rotation.float_tables = cos.dtype == DType::kFloat32;
  const DType dtype = rotation.float_tables ? DType::kFloat32 : reader.kernel().dtype;
  reader.contiguous("rotary_cos", rotation.cos, {positions, pairs}, dtype);
  reader.contiguous("rotary_sin", rotation.sin, {positions, pairs}, dtype);
  reader.require_alignment("rotary_cos");
  reader.require_alignment("rotary_sin");
  rotation.interleaved = reader.number("interleaved") != 0;
}

// The result of k has the head dimension of the kernel.
void read(Reader& reader, QuantiseParams& params) {
  const Kernel& kernel = reader.kernel();
  const bool packed = reader.has("cu_seqlens_k");
  const TensorView& k = reader.get("k");
  if (k.ndim != (packed ? 3 : 4)) {
    throw std::invalid_argument("k: got shape " + join(k.size, k.ndim) +
                                "; accepted: 3 dimensions where packed (cu_seqlens_k), else 4");
  }
  const int64_t rows_k = k.size[k.ndim - 3], nheads_kv = k.size[k.ndim - 2];
  const int64_t batch = packed ? reader.get("cu_seqlens_k").size[0] - 1 : k.size[0];
  params.batch = to_int("batch", batch);
  params.seqlen_k = params.total_k = to_length("rows of k", rows_k);
  params.nheads_kv = to_int("nheads_kv", nheads_kv);
  const int64_t blocks = scaled_blocks(packed, rows_k, rows_k, batch);
  params.blocks = to_int("blocks of keys", blocks);
  if (reader.has("v")) {
    const TensorView& v = reader.get("v");
    if (v.ndim != k.ndim) {
      throw std::invalid_argument("v: got " + std::to_string(v.ndim) +
                                  " dimensions; accepted: those of k, " + std::to_string(k.ndim));
    }
    params.headdim_v = to_int("headdim_v", v.size[v.ndim - 1]);
    Shape v_shape = rows_of(k, params.headdim_v);
    reader.operand("v", params.v, v_shape, kernel.dtype);
    reader.transposed("v_out", params.v_out,
                      values_shape(packed, batch, nheads_kv, params.headdim_v, blocks));
    read_scales(reader, "v_scale", params.v_scale, packed, batch, nheads_kv, blocks);
    if (params.v_scale.data == nullptr) throw std::invalid_argument("v_scale: missing");
  }
  reader.contiguous("cu_seqlens_k", params.cu_seqlens_k, {batch + 1}, DType::kInt32);
  params.headdim = to_int("headdim", k.size[k.ndim - 1]);
  Shape k_shape = rows_of(k, params.headdim);
  reader.operand("k", params.k, k_shape, kernel.dtype);
  k_shape.back() = kernel.headdim;
  reader.operand("k_out", params.k_out, k_shape, kernel.kv_dtype);
  read_scales(reader, "k_scale", params.k_scale, packed, batch, nheads_kv, blocks);
  if (params.k_scale.data == nullptr) throw std::invalid_argument("k_scale: missing");
  read_rotation(reader, k, params.rotation);
  const Rotation& rotation = params.rotation;
  if (rotation.cos != nullptr) {
    if (packed || rotation.float_tables || rotation.pairs % 8 != 0) {
      throw std::invalid_argument(
          "rotary_cos: accepted: the dtype of q, a multiple of 8 columns, with dense sequences");
    }
    const TensorView& q = reader.get("q");
    if (q.ndim != 4) {
      throw std::invalid_argument("q: got shape " + join(q.size, q.ndim) +
                                  "; accepted: 4 dimensions");
    }
    params.batch_q = to_int("batch of q", q.size[0]);
    params.seqlen_q = to_length("rows of q", q.size[1]);
    params.nheads = to_int("nheads", q.size[2]);
    reader.operand("q", params.q, rows_of(q, params.headdim), kernel.dtype);
    reader.operand("q_out", params.q_out, rows_of(q, params.headdim), kernel.dtype);
  }
  if (!reader.aligned()) {
    throw std::invalid_argument("q, k, v: accepted: rows of a multiple of 16 bytes");
  }
  if (params.headdim > kernel.headdim || params.headdim_v > kernel.headdim_v) {
    throw std::invalid_argument("kernel: got " + describe(kernel) + " for head dimensions " +
                                std::to_string(params.headdim) + " and " +
                                std::to_string(params.headdim_v));
  }
}

void read(Reader& reader, BackwardParams& params) {
  const Kernel& kernel = reader.kernel();
  read_common(reader, params);
  const TensorView &q = reader.get("q"), &k = reader.get("k");
  reader.operand("dout", params.dout, rows_of(q, params.headdim_v), kernel.out_dtype);
  reader.operand("dq", params.dq, rows_of(q, params.headdim), kernel.dtype);
  reader.operand("dk", params.dk, rows_of(k, params.headdim), kernel.dtype);
  reader.operand("dv", params.dv, rows_of(k, params.headdim_v), kernel.dtype);
  reader.contiguous("dlse", params.dlse, lse_shape(params), DType::kFloat32);
  reader.contiguous("delta", params.delta, lse_shape(params), DType::kFloat32);
  params.gradient_scale = params.softmax_scale * params.dropout_scale;
  params.delta_scale = 1.f / params.dropout_scale;
  complete(reader, params);
}

void read(Reader& reader, RotaryParams& params) {
  const DType dtype = reader.kernel().dtype;
  const TensorView& x = reader.get("x");
  const bool packed = reader.has("cu_seqlens");
  if (x.ndim != (packed ? 3 : 4)) {
    throw std::invalid_argument("x: got shape " + join(x.size, x.ndim) +
                                "; accepted: 3 dimensions where packed (cu_seqlens), else 4");
  }
  reader.operand("x", params.x, rows_of(x, x.size[x.ndim - 1]), dtype);
  params.in_place = !reader.has("out");
  reader.operand(params.in_place ? "x" : "out", params.out, rows_of(x, x.size[x.ndim - 1]), dtype);
  params.batch = to_int("batch", packed ? reader.get("cu_seqlens").size[0] - 1 : x.size[0]);
  params.seqlen = to_length("rows of x", packed ? x.size[0] : x.size[1]);
  params.nheads = to_int("nheads", x.size[x.ndim - 2]);
  params.headdim = to_int("headdim", x.size[x.ndim - 1]);
  read_rotation(reader, x, params.rotation);
  params.rotation.conjugate = reader.number("conjugate") != 0;
  reader.contiguous("cu_seqlens", params.cu_seqlens, {params.batch + 1}, DType::kInt32);
  reader.contiguous("offsets", params.offsets, {params.batch}, DType::kInt32);
  params.offset = reader.small_integer("offset");
  params.aligned = reader.aligned();
}

void read(Reader& reader, MergeParams& params) {
  const TensorView& out = reader.get("out");
  if (out.ndim != 4) {
    throw std::invalid_argument("out: got " + std::to_string(out.ndim) +
                                " dimensions; accepted: 4");
  }
  params.batch = to_int("batch", out.size[0]);
  params.seqlen = to_length("rows of out", out.size[1]);
  params.nheads = to_int("nheads", out.size[2]);
  params.headdim = to_int("headdim", out.size[3]);
  const Shape shape = rows_of(out, params.headdim);
  const Shape rows{params.batch, params.nheads, params.seqlen};
  reader.operand("out", params.out, shape, reader.kernel().out_dtype);
  reader.operand("part", params.part, shape, reader.kernel().dtype);
  reader.row_values("lse", params.lse, rows);
  reader.row_values("part_lse", params.part_lse, rows);
  params.aligned = reader.aligned();
}

void read(Reader& reader, AppendParams& params) {
  const DType dtype = reader.kernel().dtype;
  const TensorView &q = reader.get("q"), &k = reader.get("k"), &v = reader.get("v");
  const TensorView& k_new = reader.get("k_new");
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4 || k_new.ndim != 4) {
    throw std::invalid_argument("q, k, v, k_new: accepted: 4 dimensions");
  }
  const int64_t batch = q.size[0], nheads_kv = k.size[2], seqlen_new = k_new.size[1];
  params.batch = to_int("batch", batch);
  params.seqlen_q = to_length("rows of q", q.size[1]);
  params.seqlen_new = to_length("rows of k_new", seqlen_new);
  params.nheads = to_int("nheads", q.size[2]);
  params.nheads_kv = to_int("nheads_kv", nheads_kv);
  params.headdim = to_int("headdim", q.size[3]);
  params.headdim_v = to_int("headdim_v", v.size[3]);
  params.slots_k = to_int("batch of k", k.size[0]);
  const int64_t pages = reader.has("block_table") ? reader.get("block_table").size[1] : 1;
  params.seqlen_k = to_length("rows of the cache", k.size[1] * pages);
  if (!reader.has("block_table") && !reader.has("cache_batch_idx") &&
      params.slots_k != params.batch) {
    throw std::invalid_argument("k: got a batch of " + std::to_string(params.slots_k) +
                                "; accepted: that of q, " + std::to_string(batch));
  }
  reader.operand("q", params.q, rows_of(q, params.headdim), dtype);
  reader.operand("k", params.k, rows_of(k, params.headdim), reader.kernel().kv_dtype);
  reader.operand("v", params.v, rows_of(k, params.headdim_v), reader.kernel().kv_dtype);
  reader.operand("k_new", params.k_new, {batch, seqlen_new, nheads_kv, params.headdim}, dtype);
  reader.operand("v_new", params.v_new, {batch, seqlen_new, nheads_kv, params.headdim_v}, dtype);
  if (reader.has("rotary_cos")) {
    reader.operand("rotated_q", params.rotated_q, rows_of(q, params.headdim), dtype);
  }
  read_rotation(reader, q, params.rotation);
  params.masked = reader.number("masked") != 0;
  reader.contiguous("seqused_k", params.seqused_k, {batch}, DType::kInt32);
  reader.contiguous("lengths", params.lengths, {batch}, DType::kInt32);
  reader.contiguous("cache_batch_idx", params.cache_batch_idx, {batch}, DType::kInt32);
  if (params.seqused_k == nullptr || params.lengths == nullptr) {
    throw std::invalid_argument("seqused_k, lengths: missing");
  }
  read_pages(reader, params);
  read_descales(reader, params);
  params.aligned = reader.aligned();
}

void read(Reader& reader, WidenParams& params) {
  const Kernel& kernel = reader.kernel();
  const TensorView &k = reader.get("k"), &v = reader.get("v"), &k_out = reader.get("k_out");
  if (k.ndim != 4 || v.ndim != 4 || k_out.ndim != 4) {
    throw std::invalid_argument("k, v, k_out: accepted: 4 dimensions");
  }
  const int64_t batch = k_out.size[0], rows = k_out.size[1], nheads_kv = k.size[2];
  params.batch = to_int("batch", batch);
  params.seqlen_k = to_length("rows of k_out", rows);
  params.nheads_kv = to_int("nheads_kv", nheads_kv);
  params.headdim = to_int("headdim", k.size[3]);
  params.headdim_v = to_int("headdim_v", v.size[3]);
  params.slots_k = to_int("batch of k", k.size[0]);
  const bool paged = reader.has("block_table");
  const int64_t pages = paged ? reader.get("block_table").size[1] : 1;
  if (rows > k.size[1] * pages) {
    throw std::invalid_argument("k_out: got " + std::to_string(rows) +
                                " rows; accepted: up to those of the cache, " +
                                std::to_string(k.size[1] * pages));
  }
  if (!paged && !reader.has("cache_batch_idx") && params.slots_k != params.batch) {
    throw std::invalid_argument("k: got a batch of " + std::to_string(params.slots_k) +
                                "; accepted: that of k_out, " + std::to_string(batch));
  }
  reader.operand("k", params.k, rows_of(k, params.headdim), kernel.kv_dtype);
  reader.operand("v", params.v, rows_of(k, params.headdim_v), kernel.kv_dtype);
  reader.operand("k_out", params.k_out, {batch, rows, nheads_kv, params.headdim}, kernel.out_dtype);
  reader.operand("v_out", params.v_out, {batch, rows, nheads_kv, params.headdim_v},
                 kernel.out_dtype);
  params.reach = to_int("reach", reader.integer("reach"));
  reader.contiguous("seqused_k", params.seqused_k, {batch}, DType::kInt32);
  reader.contiguous("cache_batch_idx", params.cache_batch_idx, {batch}, DType::kInt32);
  read_pages(reader, params);
  read_descales(reader, params);
  if (!reader.aligned()) {
    throw std::invalid_argument("k, v: accepted: rows of a multiple of 16 bytes");
  }
}

}  // namespace

template <typename Params>
void Call::prepare(const Tensors& tensors, const Numbers& numbers, const char* first) {
  static_assert(std::is_trivially_copyable_v<Params>);
  const auto params = std::make_shared<Params>();
  Reader reader(*kernel_, tensors, numbers, *params, first);
  read(reader, *params);
  reader.check_all_read();
  device_ = reader.device();
  Workspaces workspaces(*params);
  const DeviceGuard guard(device_);
  launcher_ = kernel_->prepare(*params, workspaces);
  workspaces_ = workspaces.wanted();
  names_ = reader.names();
  places_ = reader.places();
  for (const Workspace& workspace : workspaces_) {
    names_.push_back(workspace.name);
    places_.push_back(workspace.place);
  }
  params_ = params;
  launch_ = [](const Call& call, void* const* addresses, cudaStream_t stream) {
    Params params = static_cast<const Params&>(*call.params_);
    for (size_t i = 0; i < call.places_.size(); ++i) {
      std::memcpy(reinterpret_cast<char*>(&params) + call.places_[i], addresses + i, sizeof(void*));
    }
    const DeviceGuard guard(call.device_);
    call.launcher_(params, stream);
  };
}

Call::Call(const Kernel& kernel, const Tensors& tensors, const Numbers& numbers)
    : kernel_(&kernel) {
  if (kernel.operation == ForwardParams::kOperation || kernel.operation == "decode") {
    prepare<ForwardParams>(tensors, numbers, "q");
  } else if (kernel.operation == QuantisedParams::kOperation) {
    prepare<QuantisedParams>(tensors, numbers, "q");
  } else if (kernel.operation == QuantiseParams::kOperation) {
    prepare<QuantiseParams>(tensors, numbers, "k");
  } else if (kernel.operation == BackwardParams::kOperation) {
    prepare<BackwardParams>(tensors, numbers, "q");
  } else if (kernel.operation == AppendParams::kOperation) {
    prepare<AppendParams>(tensors, numbers, "q");
  } else if (kernel.operation == WidenParams::kOperation) {
    prepare<WidenParams>(tensors, numbers, "k");
  } else if (kernel.operation == RotaryParams::kOperation) {
    prepare<RotaryParams>(tensors, numbers, "x");
  } else if (kernel.operation == MergeParams::kOperation) {
    prepare<MergeParams>(tensors, numbers, "out");
  } else {
    throw std::logic_error("no parameters of the operation " + std::string(kernel.operation));
  }
}

void Call::launch(void* const* addresses, cudaStream_t stream) const {
  const std::lock_guard<std::mutex> lock(launching(device_, stream));
  launch_(*this, addresses, stream);
}

}  // namespace flash
