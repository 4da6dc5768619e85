// The Python module flash_attn._C: the kernels of this build, calls of them, and what a call is
// remembered by.
#include "python.h"
// Python.h comes first.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"
#include "call_key.h"
#include "graph_slots.h"
#include "kernels.h"
#include "torch_tensor.h"

namespace flash {
namespace {

// A prepared call and where its tensors stand among the arguments and results that Python has:
// place i >= 0 is arguments[i], place -1 - i is results[i]; each begins so many bytes behind the
// tensor's address.
struct PlacedCall {
  Call call;
  std::vector<int> places;
  std::vector<int64_t> offsets;

  static constexpr size_t kMostTensors = 32;

  void launch(PyObject* arguments, PyObject* results, cudaStream_t stream) const {
    if (places.size() != call.names().size()) {
      throw std::invalid_argument("launch: the call has no places for its tensors; see at");
    }
    std::array<void*, kMostTensors> addresses;
    const Py_ssize_t counts[] = {PyTuple_Size(arguments), PyTuple_Size(results)};
    for (size_t i = 0; i < places.size(); ++i) {
      const bool is_result = places[i] < 0;
      const Py_ssize_t index = is_result ? -1 - places[i] : places[i];
      if (index >= counts[is_result]) throw std::invalid_argument("launch: too few tensors");
      PyObject* tensor = PyTuple_GetItem(is_result ? results : arguments, index);
      addresses[i] = static_cast<char*>(detail::address_of(tensor)) + offsets[i];
    }
    const GilReleased released;
    call.launch(addresses.data(), stream);
  }
};

struct CallObject {
  PyObject_HEAD PlacedCall placed;
};

PyTypeObject* call_type;  // set once, with the module

const PlacedCall& placed_of(PyObject* self) { return reinterpret_cast<CallObject*>(self)->placed; }

Ref make_call(PlacedCall placed) {
  Ref object(PyType_GenericAlloc(call_type, 0));
  new (&reinterpret_cast<CallObject*>(object.get())->placed) PlacedCall(std::move(placed));
  return object;
}

void delete_call(PyObject* self) {
  reinterpret_cast<CallObject*>(self)->placed.~PlacedCall();
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

void check_type(const char* name, PyObject* object, bool is_accepted, const char* accepted) {
  if (is_accepted) return;
  PyErr_Format(PyExc_TypeError, "%s: got %R; accepted: %s", name, Py_TYPE(object), accepted);
  throw PythonError();
}

Ref to_str(std::string_view text) {
  return Ref(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

cudaStream_t to_stream(PyObject* number) {
  const auto stream = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(number));
  check_error();
  return reinterpret_cast<cudaStream_t>(stream);
}

template <typename T>
std::vector<T> to_numbers(PyObject* sequence) {
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) throw PythonError();
  std::vector<T> numbers;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Ref item(PySequence_GetItem(sequence, i));
    numbers.push_back(static_cast<T>(PyLong_AsLongLong(item.get())));
    check_error();
  }
  return numbers;
}

// dict of str -> whatever `convert` makes of a name and a value
template <typename T, typename Convert>
std::map<std::string, T> to_map(const char* argument, PyObject* dict, Convert convert) {
  check_type(argument, dict, PyDict_Check(dict), "a dict");
  std::map<std::string, T> map;
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);) {
    // To convert may run Python, which may drop what the dict has.
    const Ref kept_key = Ref::borrow(key), kept_value = Ref::borrow(value);
    const char* name = PyUnicode_AsUTF8AndSize(key, nullptr);
    if (name == nullptr) throw PythonError();
    map.emplace(name, convert(name, value));
  }
  return map;
}

// --- What the module has: functions of `arguments`, as many as kMethods says
// ----------------------

Ref prepare(PyObject*, PyObject* const* arguments) {
  const Py_ssize_t kernel = PyLong_AsSsize_t(arguments[0]);
  check_error();
  if (kernel < 0 || kernel >= static_cast<Py_ssize_t>(kernels().size())) {
    throw std::invalid_argument("kernel: no such row");
  }
  const auto tensors =
      to_map<TensorView>("tensors", arguments[1], [](const char* name, PyObject* tensor) {
        const bool is_tensor = PyObject_TypeCheck(tensor, detail::TorchNames::get().tensor_type);
        check_type(name, tensor, is_tensor, "torch.Tensor");
        return detail::view_tensor(tensor);
      });
  const auto numbers = to_map<double>("numbers", arguments[2], [](const char*, PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    check_error();
    return number;
  });
  Call call(*kernels()[kernel], tensors, numbers);
  if (call.names().size() > PlacedCall::kMostTensors) {
    throw std::invalid_argument("tensors: got more than a launch takes");
  }
  return make_call({std::move(call), {}, {}});
}

Ref at(PyObject* self, PyObject* const* arguments) {
  PlacedCall placed{placed_of(self).call, to_numbers<int>(arguments[0]),
                    to_numbers<int64_t>(arguments[1])};
  const size_t count = placed.call.names().size();
  if (placed.places.size() != count || placed.offsets.size() != count) {
    throw std::invalid_argument("places, offsets: got " + std::to_string(placed.places.size()) +
                                " and " + std::to_string(placed.offsets.size()) +
                                "; accepted: one for each of names");
  }
  return make_call(std::move(placed));
}

Ref launch(PyObject* self, PyObject* const* arguments) {
  check_type("arguments", arguments[0], PyTuple_Check(arguments[0]), "a tuple");
  check_type("results", arguments[1], PyTuple_Check(arguments[1]), "a tuple");
  placed_of(self).launch(arguments[0], arguments[1], to_stream(arguments[2]));
  return Ref::borrow(Py_None);
}

Ref call_key_of(PyObject*, PyObject* const* arguments) {
  check_type("arguments", arguments[0], PyTuple_Check(arguments[0]), "a tuple");
  const int64_t settings = PyLong_AsLongLong(arguments[1]);
  check_error();
  return call_key(arguments[0], settings);
}

Ref zeros_owner_of(PyObject*, PyObject* const* arguments) {
  const auto owner = zeros_owner(to_stream(arguments[0]));
  return owner ? Ref(PyLong_FromLongLong(*owner)) : Ref::borrow(Py_None);
}

Ref kernel_rows(PyObject*, PyObject* const*) {
  return to_list(kernels(), [](const Kernel* kernel) {
    std::vector<const char*> takes;
    for (const FeatureName& x : kFeatureNames) {
      if (kernel->takes & x.feature) takes.push_back(x.name);
    }
    return Ref(Py_BuildValue("(NNsssiiNNi)", to_str(kernel->operation).release(),
                             to_str(kernel->backend).release(), name(kernel->dtype),
                             name(kernel->kv_dtype), name(kernel->out_dtype), kernel->headdim,
                             kernel->headdim_v, to_str(kernel->features).release(),
                             to_list(takes, to_str).release(), kernel->tiles));
  });
}

PyObject* names(PyObject* self, void*) {
  return guarded([&] { return to_list(placed_of(self).call.names(), to_str); });
}

PyObject* workspaces(PyObject* self, void*) {
  return guarded([&] {
    return to_list(placed_of(self).call.workspaces(), [](const Workspace& x) {
      return Ref(Py_BuildValue("(sLO)", x.name, static_cast<long long>(x.bytes),
                               x.kept_zero ? Py_True : Py_False));
    });
  });
}

// A row of Python's table for a function of kCount arguments, none of them by keyword.
template <auto kFunction, Py_ssize_t kCount>
PyMethodDef method(const char* name, const char* doc) {
  using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  const Entry entry = [](PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&] {
      if (count != kCount) {
        PyErr_Format(PyExc_TypeError, "got %zd arguments; accepted: %zd", count, kCount);
        throw PythonError();
      }
      return kFunction(self, arguments);
    });
  };
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry)), METH_FASTCALL,
          doc};
}

PyMethodDef call_methods[] = {
    method<at, 2>("at",
                  "at(places, offsets): the call with a place for each of `names`: i for "
                  "arguments[i], -1 - i for results[i]; and how many bytes behind the tensor's "
                  "address it begins."),
    method<launch, 3>("launch",
                      "launch(arguments, results, stream): launch on `stream`, a cudaStream_t as "
                      "an integer, with tensors whose shapes, strides, dtypes, devices and "
                      "alignment are those that the call was prepared with."),
    {},
};

PyGetSetDef call_properties[] = {
    {"names", names, nullptr, "The tensors that a launch takes: those given, then the workspaces.",
     nullptr},
    {"workspaces", workspaces, nullptr,
     "What to allocate for a launch: (name, bytes, whether it is zero before and after each "
     "launch).",
     nullptr},
    {},
};

PyMethodDef functions[] = {
    method<prepare, 3>("prepare",
                       "prepare(kernel, tensors, numbers): check and read a call of row `kernel` "
                       "of `kernels()`. tensors: arguments and results by name; numbers: the "
                       "others. shared_memory: bytes of a thread block, 0: what the device has."),
    method<call_key_of, 2>("call_key",
                           "call_key(arguments, settings): what a call of these arguments depends "
                           "on, but for the addresses and values of its tensors, as bytes; None if "
                           "they are not all plain CUDA tensors, numbers of Python or None."),
    method<zeros_owner_of, 1>("zeros_owner",
                              "zeros_owner(stream): whose memory it is that kernels keep zero, if "
                              "they run on `stream`, a cudaStream_t: that of the stream, a number "
                              "of its own from 0 on; or that of the CUDA graph that captures it, "
                              "-1 - i for i of 0 .. GRAPH_SLOTS - 1, or None if all are taken."),
    method<kernel_rows, 0>("kernels",
                           "kernels(): the kernels of this build: (operation, backend, dtype, "
                           "dtype of k and v, dtype of the result, headdim, headdim_v, feature "
                           "set, features, number of tile shapes)."),
    {},
};

Ref make_module() {
  detail::TorchNames::get();  // Python runs here, not in a thread's first call while others wait
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(delete_call)},
      {Py_tp_methods, call_methods},
      {Py_tp_getset, call_properties},
      {},
  };
  static PyType_Spec spec = {"flash_attn._C.Call", sizeof(CallObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "flash_attn._C",
      "The compiled kernels of flash_attn. flash_attn/_backends/cuda.py is the only caller.",
      -1,
      functions,
      nullptr,
      nullptr,
      nullptr,
      nullptr};
  Ref module(PyModule_Create(&definition));
  Ref type(PyType_FromSpec(&spec));
  if (PyModule_AddObjectRef(module.get(), "Call", type.get()) != 0 ||
      PyModule_AddIntConstant(module.get(), "GRAPH_SLOTS", kGraphSlots) != 0 ||
      PyModule_AddIntConstant(module.get(), "KEPT_ZERO", kKeptZero) != 0) {
    throw PythonError();
  }
  call_type = reinterpret_cast<PyTypeObject*>(type.release());
  return module;
}

}  // namespace
}  // namespace flash

PyMODINIT_FUNC PyInit__C() {
  return flash::guarded([] { return flash::make_module(); });
}
