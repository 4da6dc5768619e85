// Reads a torch.Tensor through DLPack or, of an older torch, through Python attributes: nothing of
// libtorch is linked, so one build serves every torch.
#pragma once

#include "python.h"
// Python.h comes first.
#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

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
    const Ref torch(PyImport_ImportModule("torch")), nn(PyImport_ImportModule("torch.nn"));
    const auto keep = [&](const char* name, const Ref& module) {
      return Ref(PyObject_GetAttrString(module.get(), name)).release();
    };
    tensor_type = reinterpret_cast<PyTypeObject*>(keep("Tensor", torch));
    parameter_type = reinterpret_cast<PyTypeObject*>(keep("Parameter", nn));
    float16 = keep("float16", torch);
    bfloat16 = keep("bfloat16", torch);
    float8_e4m3fn = keep("float8_e4m3fn", torch);
    int8 = keep("int8", torch);
    float32 = keep("float32", torch);
    int32 = keep("int32", torch);
    int64 = keep("int64", torch);
    read_tensor = dlpack::find_read_tensor(reinterpret_cast<PyObject*>(tensor_type));
  }

  static const TorchNames& get() {
    static const TorchNames names;
    return names;
  }
};

inline Ref call_method(PyObject* object, PyObject* method) {
  return Ref(PyObject_CallMethodObjArgs(object, method, nullptr));
}

inline Ref attribute(PyObject* object, PyObject* name) {
  return Ref(PyObject_GetAttr(object, name));
}

// data_ptr() of a tensor, through Python.
inline void* data_ptr_of(PyObject* tensor) {
  void* const address = PyLong_AsVoidPtr(call_method(tensor, TorchNames::get().data_ptr).get());
  check_error();
  return address;
}

inline void check_dims(Py_ssize_t ndim) {
  if (ndim > TensorView::kMaxDims) {
    throw std::invalid_argument("a tensor of more than 5 dimensions");
  }
}

// shape and stride() are tuples of int.
inline int read_tuple(const Ref& tuple, std::array<int64_t, TensorView::kMaxDims>& values) {
  const Py_ssize_t length = PyTuple_Size(tuple.get());
  if (length < 0) throw PythonError();
  check_dims(length);
  for (Py_ssize_t i = 0; i < length; ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple.get(), i));
    check_error();
  }
  return static_cast<int>(length);
}

inline TensorView view_attributes(PyObject* tensor) {
  const TorchNames& names = TorchNames::get();
  TensorView view;
  view.data = data_ptr_of(tensor);
  view.ndim = read_tuple(attribute(tensor, names.shape), view.size);
  read_tuple(call_method(tensor, names.stride), view.stride);
  view.device = static_cast<int>(PyLong_AsLong(call_method(tensor, names.get_device).get()));
  const Ref dtype = attribute(tensor, names.dtype);
  if (dtype.get() == names.float16) view.dtype = DType::kFloat16;
  if (dtype.get() == names.bfloat16) view.dtype = DType::kBFloat16;
  if (dtype.get() == names.float8_e4m3fn) view.dtype = DType::kFloat8E4M3;
  if (dtype.get() == names.int8) view.dtype = DType::kInt8;
  if (dtype.get() == names.float32) view.dtype = DType::kFloat32;
  if (dtype.get() == names.int32) view.dtype = DType::kInt32;
  if (dtype.get() == names.int64) view.dtype = DType::kInt64;
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

inline TensorView view_tensor(PyObject* tensor) {
  const TorchNames& names = TorchNames::get();
  if (names.read_tensor == nullptr) return view_attributes(tensor);
  dlpack::Tensor read;
  if (names.read_tensor(tensor, &read) != 0) throw PythonError();
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

inline void* address_of(PyObject* tensor) {
  const TorchNames& names = TorchNames::get();
  if (names.read_tensor == nullptr) return data_ptr_of(tensor);
  dlpack::Tensor read;
  if (names.read_tensor(tensor, &read) != 0) throw PythonError();
  return read.data;
}

}  // namespace detail
}  // namespace flash
