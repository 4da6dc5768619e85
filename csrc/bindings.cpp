// The Python module flash_attn._C: the kernels of this build, calls of them, and what a call is
// remembered by.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"
#include "call_key.h"
#include "graph_slots.h"
#include "kernels.h"
#include "torch_tensor.h"

namespace py = pybind11;

namespace flash {
namespace {

// A prepared call and where its tensors stand among the arguments and results that Python has:
// place i >= 0 is arguments[i], place -1 - i is results[i]; each begins so many bytes behind the
// tensor's address.
struct PlacedCall {
  Call call;
  std::vector<int> places;
  std::vector<int64_t> offsets;

  PlacedCall at(std::vector<int> new_places, std::vector<int64_t> new_offsets) const {
    const size_t count = call.names().size();
    if (new_places.size() != count || new_offsets.size() != count) {
      throw std::invalid_argument("places, offsets: got " + std::to_string(new_places.size()) +
                                  " and " + std::to_string(new_offsets.size()) +
                                  "; accepted: one for each of names");
    }
    return {call, std::move(new_places), std::move(new_offsets)};
  }

  void launch(const py::tuple& arguments, const py::tuple& results, uintptr_t stream) const {
    std::array<void*, 32> addresses;
    for (size_t i = 0; i < places.size(); ++i) {
      const int place = places[i];
      const py::tuple& source = place < 0 ? results : arguments;
      const size_t index = place < 0 ? -1 - place : place;
      if (index >= source.size()) throw std::invalid_argument("launch: too few tensors");
      addresses[i] = static_cast<char*>(detail::address_of(PyTuple_GET_ITEM(source.ptr(), index))) +
                     offsets[i];
    }
    const py::gil_scoped_release release;
    call.launch(addresses.data(), reinterpret_cast<cudaStream_t>(stream));
  }
};

PlacedCall prepare(size_t kernel, const Tensors& tensors, const Numbers& numbers) {
  if (kernel >= kernels().size()) throw std::invalid_argument("kernel: no such row");
  return {Call(*kernels()[kernel], tensors, numbers), {}, {}};
}

using KernelRow = std::tuple<std::string, std::string, std::string, std::string, std::string, int,
                             int, std::string, std::vector<std::string>, int>;

std::vector<KernelRow> kernel_rows() {
  std::vector<KernelRow> rows;
  for (const Kernel* kernel : kernels()) {
    std::vector<std::string> takes;
    for (const FeatureName& x : kFeatureNames) {
      if (kernel->takes & x.feature) takes.emplace_back(x.name);
    }
    rows.emplace_back(kernel->operation, kernel->backend, name(kernel->dtype),
                      name(kernel->kv_dtype), name(kernel->out_dtype), kernel->headdim,
                      kernel->headdim_v, kernel->features, std::move(takes), kernel->tiles);
  }
  return rows;
}

using WorkspaceRow = std::tuple<std::string, int64_t, bool>;

std::vector<WorkspaceRow> workspace_rows(const PlacedCall& placed) {
  std::vector<WorkspaceRow> rows;
  for (const Workspace& x : placed.call.workspaces()) {
    rows.emplace_back(x.name, x.bytes, x.kept_zero);
  }
  return rows;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(_C, module) {
  using py::arg;
  module.doc() =
      "The compiled kernels of flash_attn. flash_attn/_backends/cuda.py is the only caller.";
  py::class_<flash::PlacedCall>(module, "Call")
      .def_property_readonly(
          "names", [](const flash::PlacedCall& placed) { return placed.call.names(); },
          "The tensors that a launch takes: those given, then the workspaces.")
      .def_property_readonly(
          "workspaces", &flash::workspace_rows,
          "What to allocate for a launch: (name, bytes, whether it is zero before and after each "
          "launch).")
      .def("at", &flash::PlacedCall::at, arg("places"), arg("offsets"),
           "The call with a place for each of `names`: i for arguments[i], -1 - i for results[i]; "
           "and how many bytes behind the tensor's address it begins.")
      .def("launch", &flash::PlacedCall::launch, arg("arguments"), arg("results"), arg("stream"),
           "Launch on `stream`, a cudaStream_t as an integer, with tensors whose shapes, strides, "
           "dtypes, devices and alignment are those that the call was prepared with.");
  module.def("prepare", &flash::prepare, arg("kernel"), arg("tensors"), arg("numbers"),
             "Check and read a call of row `kernel` of `kernels()`. tensors: arguments and results "
             "by name; numbers: the others. shared_memory: bytes of a thread block, 0: what the "
             "device has.");
  module.def("call_key", &flash::call_key, arg("arguments"), arg("settings"),
             "What a call of these arguments depends on, but for the addresses and values of its "
             "tensors, as bytes; None if they are not all plain CUDA tensors, numbers of Python or "
             "None.");
  module.def(
      "zeros_owner",
      [](uintptr_t stream) { return flash::zeros_owner(reinterpret_cast<cudaStream_t>(stream)); },
      arg("stream"),
      "Whose memory it is that kernels keep zero, if they run on `stream`, a cudaStream_t: that of "
      "the stream, a number of its own from 0 on; or that of the CUDA graph that captures it, -1 - "
      "i for i of 0 .. GRAPH_SLOTS - 1, or None if all are taken.");
  module.attr("GRAPH_SLOTS") = flash::kGraphSlots;
  module.attr("KEPT_ZERO") = flash::kKeptZero;
  module.def(
      "kernels", &flash::kernel_rows,
      "The kernels of this build: (operation, backend, dtype, dtype of k and v, dtype of the "
      "result, headdim, "
      "headdim_v, feature set, features, number of tile shapes).");
}
