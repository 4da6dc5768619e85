// What a call depends on, but for the addresses and values of its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "torch_tensor.h"

namespace flash {

class CallKey {
 public:
  explicit CallKey(int64_t settings) {
    bytes_.reserve(512);
    append(settings);
  }

  // False for what a call must not be remembered by: anything but a plain CUDA tensor (a subclass
  // may mean something else by its data), a number of Python or None.
  bool add(pybind11::handle argument) {
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
      return add_tensor(argument);
    }
    return true;
  }

  pybind11::bytes bytes() const { return pybind11::bytes(bytes_); }

 private:
  bool add_tensor(pybind11::handle argument) {
    const auto& torch = detail::TorchNames::get();
    if (torch.read_tensor == nullptr || (!Py_IS_TYPE(argument.ptr(), torch.tensor_type) &&
                                         !Py_IS_TYPE(argument.ptr(), torch.parameter_type))) {
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

  template <typename... Values>
  void append(const Values&... values) {
    (bytes_.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  }

  std::string bytes_;
};

inline pybind11::object call_key(const pybind11::tuple& arguments, int64_t settings) {
  CallKey key(settings);
  for (const auto& argument : arguments) {
    if (!key.add(argument)) return pybind11::none();
  }
  return key.bytes();
}

}  // namespace flash
