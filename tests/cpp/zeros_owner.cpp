// Whose zeros a stream's kernels use (graph_slots.cpp), with a CUDA runtime that knows of two green
// contexts, whose default streams have one handle, and of a stream that graphs are captured from.
#include <cstdio>
#include <cstdlib>

#include "graph_slots.cpp"

using namespace flash;

int context = 0;                 // the current one
unsigned long long capture = 0;  // of other streams than the default one; 0: none
bool graph_takes = true;         // whether the graph can keep an object
cudaHostFn_t destroy = nullptr;  // of the last object, with its value
void* value = nullptr;

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "name"; }
const char* cudaGetErrorString(cudaError_t) { return "text"; }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = stream == nullptr ? context : reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  if (stream == nullptr && capture != 0) return cudaErrorStreamCaptureImplicit;
  *status = capture == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  *id = capture;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void* ptr, cudaHostFn_t function, unsigned,
                                 unsigned) {
  destroy = function, value = ptr;
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) {
  return destroy(value), cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return graph_takes ? cudaSuccess : cudaErrorMemoryAllocation;
}
}

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::printf("%s\n", what);
  std::exit(1);
}

int main() {
  const auto stream = [](int i) { return reinterpret_cast<cudaStream_t>(uintptr_t{100} + i); };
  const auto of_default = zeros_owner(nullptr);
  context = 1;
  check(zeros_owner(nullptr) != of_default, "two default streams are one");
  check(zeros_owner(stream(0)) == 100 && zeros_owner(stream(1)) == 101, "streams have their ids");
  capture = 7;
  check(*zeros_owner(nullptr) >= 0, "the default stream is never captured");
  check(zeros_owner(stream(0)) == -1 && zeros_owner(stream(0)) == -1, "one slot of a stream");
  const auto give_first_back = destroy;
  void* const first = value;
  for (int i = 1; i < kGraphSlots; ++i) check(zeros_owner(stream(i)) == -1 - i, "each has one");
  check(!zeros_owner(stream(kGraphSlots)), "all are taken");
  give_first_back(first);
  graph_takes = false;
  try {
    zeros_owner(stream(kGraphSlots));
    check(false, "no error");
  } catch (const std::runtime_error&) {
  }
  graph_takes = true;
  check(zeros_owner(stream(kGraphSlots)) == -1, "a slot is lost by an error");
}
