#include "graph_slots.h"

#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "host/cuda_check.h"

namespace flash {
namespace {

class GraphSlots {
 public:
  using User = std::pair<unsigned long long, cudaStream_t>;  // a capture, a stream of it

  GraphSlots() : free_(kGraphSlots) { std::iota(free_.rbegin(), free_.rend(), 0); }

  // The slot of the user, or -1; and whether the user has just got it.
  std::pair<int, bool> find_or_take(const User& user) {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(user);
    if (found != taken_.end()) return {found->second, false};
    if (free_.empty()) return {-1, false};
    const int slot = free_.back();
    free_.pop_back();
    taken_.emplace(user, slot);
    return {slot, true};
  }

  void give_back(int slot) {
    const std::lock_guard lock(mutex_);
    for (auto it = taken_.begin(); it != taken_.end(); ++it) {
      if (it->second == slot) {
        taken_.erase(it);
        free_.push_back(slot);
        return;
      }
    }
  }

 private:
  std::mutex mutex_;
  std::map<User, int> taken_;
  std::vector<int> free_;
};

// Never destroyed: graphs may outlive static objects.
GraphSlots& slots() {
  static auto* const all = new GraphSlots;
  return *all;
}

// By a thread of the driver, when the graph and what was instantiated from it are gone.
void CUDART_CB give_back(void* slot) {
  slots().give_back(static_cast<int>(reinterpret_cast<intptr_t>(slot)));
}

}  // namespace

std::optional<int64_t> zeros_owner(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0, id = 0;
  cudaGraph_t graph = nullptr;
  // The default stream is never captured, and cannot be asked while some others are.
  if (stream != nullptr) {
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph),
               "cudaStreamGetCaptureInfo");
  }
  if (status != cudaStreamCaptureStatusActive) {
    check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
    return static_cast<int64_t>(id);
  }
  const auto [slot, is_new] = slots().find_or_take({capture, stream});
  if (slot < 0) return std::nullopt;
  if (is_new) {
    cudaUserObject_t object;
    auto* const value = reinterpret_cast<void*>(static_cast<intptr_t>(slot));
    cudaError_t result =
        cudaUserObjectCreate(&object, value, give_back, 1, cudaUserObjectNoDestructorSync);
    if (result != cudaSuccess) {
      slots().give_back(slot);
      check_cuda(result, "cudaUserObjectCreate");
    }
    // If it fails, the object goes, and with it the slot.
    result = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (result != cudaSuccess) {
      cudaUserObjectRelease(object);
      check_cuda(result, "cudaGraphRetainUserObject");
    }
  }
  return -1 - slot;
}

}  // namespace flash
