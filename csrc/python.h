// Python's C API as all versions from 3.10 on share it (the limited API), so that one build serves
// them: owned references, and Python's errors as C++ exceptions.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <stdexcept>
#include <utility>

namespace flash {

// Thrown where Python has an error set.
struct PythonError {};

// One owned reference. A null that Python returned is an error that it has set.
class Ref {
 public:
  explicit Ref(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw PythonError();
  }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  ~Ref() { Py_XDECREF(object_); }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

inline void check_error() {
  if (PyErr_Occurred() != nullptr) throw PythonError();
}

// What `function` returns, a Ref, for Python; null, with the error set, if it throws.
template <typename Function>
PyObject* guarded(Function function) noexcept {
  try {
    return function().release();
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A list of what `convert` makes of each value.
template <typename Values, typename Convert>
Ref to_list(const Values& values, Convert convert) {
  Ref list(PyList_New(0));
  for (const auto& value : values) {
    if (PyList_Append(list.get(), convert(value).get()) != 0) throw PythonError();
  }
  return list;
}

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { PyEval_RestoreThread(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flash
