// Reads a torch.Tensor through DLPack or, of an older torch, through Python attributes: nothing of
// libtorch is linked, so one build serves every torch.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "dlpack.h"
#include "params.h"
#include "tensor_view.h"

namespace flash {

namespace detail {

// What every conversion needs of torch. It lives as long as the process.
struct TorchNames {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyTypeObject *tensor_type, *parameter_type;
  PyObject* float16;
  PyObject* bfloat16;
  PyObject* float8_e4m3fn;
  PyObject* int8;
  PyObject* float32;
  PyObject* int32;
  PyObject* int64;
  dlpack::ReadTensor read_tensor;  // null before torch 2.10

  TorchNames() {
    const auto torch = pybind11::module_::import("torch");
    const auto keep = [&](const char* name) {
      return pybind11::object(torch.attr(name)).release().ptr();
    };
    tensor_type = reinterpret_cast<PyTypeObject*>(keep("Tensor"));
    parameter_type = reinterpret_cast<PyTypeObject*>(
        pybind11::object(torch.attr("nn").attr("Parameter")).release().ptr());
    float16 = keep("float16");
    bfloat16 = keep("bfloat16");
    float8_e4m3fn = keep("float8_e4m3fn");
    int8 = keep("int8");
    float32 = keep("float32");
    int32 = keep("int32");
    int64 = keep("int64");
    read_tensor = dlpack::find_read_tensor(torch.attr("Tensor"));
  }

  static const TorchNames& get() {
    static const TorchNames names;
    return names;
  }
};

inline pybind11::object checked(PyObject* result) {
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

inline pybind11::object call_method(pybind11::handle object, PyObject* method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method));
}

inline pybind11::object attribute(pybind11::handle object, PyObject* name) {
  return checked(PyObject_GetAttr(object.ptr(), name));
}

inline void check_dims(Py_ssize_t ndim) {
  if (ndim > TensorView::kMaxDims) {
    throw pybind11::value_error("a tensor of more than 5 dimensions");
  }
}

// shape and stride() are tuples of int.
inline int read_tuple(pybind11::handle tuple, std::array<int64_t, TensorView::kMaxDims>& values) {
  const Py_ssize_t length = PyTuple_GET_SIZE(tuple.ptr());
  check_dims(length);
  for (Py_ssize_t i = 0; i < length; ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
  }
  return static_cast<int>(length);
}

inline TensorView view_attributes(pybind11::handle tensor) {
  const TorchNames& names = TorchNames::get();
  TensorView view;
  view.data = PyLong_AsVoidPtr(call_method(tensor, names.data_ptr).ptr());
  view.ndim = read_tuple(attribute(tensor, names.shape), view.size);
  read_tuple(call_method(tensor, names.stride), view.stride);
  view.device = static_cast<int>(PyLong_AsLong(call_method(tensor, names.get_device).ptr()));
  const auto dtype = attribute(tensor, names.dtype);
  if (dtype.ptr() == names.float16) view.dtype = DType::kFloat16;
  if (dtype.ptr() == names.bfloat16) view.dtype = DType::kBFloat16;
  if (dtype.ptr() == names.float8_e4m3fn) view.dtype = DType::kFloat8E4M3;
  if (dtype.ptr() == names.int8) view.dtype = DType::kInt8;
  if (dtype.ptr() == names.float32) view.dtype = DType::kFloat32;
  if (dtype.ptr() == names.int32) view.dtype = DType::kInt32;
  if (dtype.ptr() == names.int64) view.dtype = DType::kInt64;
  return view;
}

inline DType dtype_of(dlpack::DataType type) {
  using dlpack::kBfloat, dlpack::kFloat, dlpack::kInt;
  if (type.code == kFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == kBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code == dlpack::kFloat8E4M3) return DType::kFloat8E4M3;
  if (type.code == kFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == kInt && type.bits == 8) return DType::kInt8;
  if (type.code == kInt && type.bits == 32) return DType::kInt32;
  if (type.code == kInt && type.bits == 64) return DType::kInt64;
  return DType::kOther;
}

inline TensorView view_tensor(pybind11::handle tensor) {
  const TorchNames& names = TorchNames::get();
  if (names.read_tensor == nullptr) return view_attributes(tensor);
  dlpack::Tensor read;
  if (names.read_tensor(tensor.ptr(), &read) != 0) throw pybind11::error_already_set();
  check_dims(read.ndim);
  TensorView view;
  view.data = read.data;
  view.dtype = dtype_of(read.dtype);
  view.ndim = read.ndim;
  std::copy_n(read.shape, read.ndim, view.size.begin());
  std::copy_n(read.strides, read.ndim, view.stride.begin());
  if (read.device_type == dlpack::kCuda) view.device = read.device;
  return view;
}

inline void* address_of(pybind11::handle tensor) {
  const TorchNames& names = TorchNames::get();
  if (names.read_tensor == nullptr) {
    return PyLong_AsVoidPtr(call_method(tensor, names.data_ptr).ptr());
  }
  dlpack::Tensor read;
  if (names.read_tensor(tensor.ptr(), &read) != 0) throw pybind11::error_already_set();
  return read.data;
}

}  // namespace detail
}  // namespace flash

namespace pybind11::detail {

template <>
struct type_caster<flash::TensorView> {
  PYBIND11_TYPE_CASTER(flash::TensorView, const_name("torch.Tensor"));

  bool load(handle source, bool /*convert*/) {
    // pybind11 then raises TypeError with the signature.
    if (!PyObject_TypeCheck(source.ptr(), flash::detail::TorchNames::get().tensor_type)) {
      return false;
    }
    value = flash::detail::view_tensor(source);
    return true;
  }
};

}  // namespace pybind11::detail
