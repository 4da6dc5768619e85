// What a call depends on, but for the addresses and values of its tensors.
#pragma once

#include "python.h"
// Python.h comes first.
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
  bool add(PyObject* object) {
    if (object == Py_None) {
      append('n');
    } else if (PyBool_Check(object)) {
      append(object == Py_True ? 't' : 'f');
    } else if (PyFloat_CheckExact(object)) {
      append('d', PyFloat_AsDouble(object));
    } else if (PyLong_CheckExact(object)) {
      int overflow;
      append('i', PyLong_AsLongLongAndOverflow(object, &overflow));
      return overflow == 0;
    } else {
      return add_tensor(object);
    }
    return true;
  }

  Ref bytes() const {
    return Ref(PyBytes_FromStringAndSize(bytes_.data(), static_cast<Py_ssize_t>(bytes_.size())));
  }

 private:
  bool add_tensor(PyObject* object) {
    const auto& torch = detail::TorchNames::get();
    if (torch.read_tensor == nullptr ||
        (Py_TYPE(object) != torch.tensor_type && Py_TYPE(object) != torch.parameter_type)) {
      return false;
    }
    dlpack::Tensor tensor;
    if (torch.read_tensor(object, &tensor) != 0) {
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

// arguments: a tuple
inline Ref call_key(PyObject* arguments, int64_t settings) {
  CallKey key(settings);
  const Py_ssize_t count = PyTuple_Size(arguments);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!key.add(PyTuple_GetItem(arguments, i))) return Ref::borrow(Py_None);
  }
  return key.bytes();
}

}  // namespace flash
