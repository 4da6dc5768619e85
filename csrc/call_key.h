// What a call depends on, but for the addresses and values of its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "tensor_view.h"

namespace flash {

class CallKey {
 public:
  CallKey() { bytes_.reserve(512); }

  // False for anything but a number of Python or None. (A tensor's value may change.)
  bool add_number(pybind11::handle argument) {
    PyObject* object = argument.ptr();
    if (object == Py_None) {
      append('n');
    } else if (PyBool_Check(object)) {
      append(object == Py_True ? 't' : 'f');
    } else if (PyFloat_CheckExact(object)) {
      append('d', PyFloat_AS_DOUBLE(object));
    } else if (PyLong_CheckExact(object)) {
      int overflow;
      append('i', PyLong_AsLongLongAndOverflow(object, &overflow));
      return overflow == 0;
    } else {
      return false;
    }
    return true;
  }

  // False for anything but a plain CUDA tensor.
  bool add_tensor(pybind11::handle argument) {
    const auto& torch = detail::TorchNames::get();
    // A subclass may mean something else by its data, and is the dispatcher's.
    if (torch.read_tensor == nullptr || !Py_IS_TYPE(argument.ptr(), torch.tensor_type)) {
      return false;
    }
    dlpack::Tensor tensor;
    if (torch.read_tensor(argument.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    append('x', tensor.dtype, tensor.device_type, tensor.device, tensor.ndim);
    for (int i = 0; i < tensor.ndim; ++i) append(tensor.shape[i], tensor.strides[i]);
    append(reinterpret_cast<uintptr_t>(tensor.data) % 16);
    return tensor.device_type == dlpack::kCuda;
  }

  pybind11::bytes bytes() const { return pybind11::bytes(bytes_); }

 private:
  template <typename... Values>
  void append(const Values&... values) {
    (bytes_.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  }

  std::string bytes_;
};

inline pybind11::object call_key(pybind11::handle q, pybind11::handle k, pybind11::handle v,
                                 const pybind11::args& numbers) {
  CallKey key;
  if (!key.add_tensor(q) || !key.add_tensor(k) || !key.add_tensor(v)) return pybind11::none();
  for (const auto& number : numbers) {
    if (!key.add_number(number)) return pybind11::none();
  }
  return key.bytes();
}

}  // namespace flash
