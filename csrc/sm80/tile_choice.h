// Which tile shapes fit a GPU. Host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash::sm80 {

// Thread blocks with `shared_bytes` each that fit an SM, if one may use `shared_memory`.
inline int fitting_blocks(size_t shared_bytes, int shared_memory) {
  // An SM has 1 KB more than one thread block may use, and keeps 1 KB for each.
  return static_cast<int>((int64_t{shared_memory} + 1024) /
                          (static_cast<int64_t>(shared_bytes) + 1024));
}

[[noreturn]] inline void refuse_shared_memory(int shared_memory, int headdim, int headdim_v,
                                              size_t least) {
  throw std::invalid_argument("shared_memory: got " + std::to_string(shared_memory) +
                              " bytes; accepted for head dimensions " + std::to_string(headdim) +
                              " and " + std::to_string(headdim_v) + ": at least " +
                              std::to_string(least));
}

// Calls launch(config) with the first tile shape from Config on of which blocks_per_sm thread
// blocks fit an SM's shared memory, with the last one if even one does. One thread block may use
// `shared_memory` bytes.
template <typename Config, typename Launch>
void launch_with_fitting_tile(int shared_memory, Launch launch) {
  const int blocks = fitting_blocks(Config::kSharedBytes, shared_memory);
  if (blocks >= (Config::kIsLast ? 1 : Config::kBlocksPerSm)) {
    launch(Config());
  } else if constexpr (!Config::kIsLast) {
    launch_with_fitting_tile<typename Config::Next>(shared_memory, launch);
  } else {
    refuse_shared_memory(shared_memory, Config::kHeadDim, Config::kHeadDimV, Config::kSharedBytes);
  }
}

}  // namespace flash::sm80
