// The part of DLPack 1 (github.com/dmlc/dlpack, DLPackExchangeAPI) that reads a tensor from C.
// torch has it since 2.10; it takes a tenth of the time of Python's attributes.
#pragma once

#include "python.h"
// Python.h comes first.
#include <cstdint>

namespace flash::dlpack {

constexpr int32_t kCuda = 2;                                            // DLDeviceType
constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4, kFloat8E4M3 = 10;  // DLDataTypeCode

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

// Shape and strides are the tensor's own: they live as long as it does.
struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t ndim;
  DataType dtype;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

// Returns 0, or another number and sets Python's error.
using ReadTensor = int (*)(void* object, Tensor* tensor);

struct ExchangeApi {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* from_object;
  void* to_object;
  ReadTensor read_tensor;
  void* current_stream;
};

// Null where the tensor type has no such interface.
inline ReadTensor find_read_tensor(PyObject* type) {
  constexpr char kAttribute[] = "__dlpack_c_exchange_api__", kName[] = "dlpack_exchange_api";
  if (!PyObject_HasAttrString(type, kAttribute)) return nullptr;
  const Ref capsule(PyObject_GetAttrString(type, kAttribute));
  if (!PyCapsule_IsValid(capsule.get(), kName)) return nullptr;
  const auto* api = static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), kName));
  return api->major == 1 ? api->read_tensor : nullptr;
}

}  // namespace flash::dlpack
