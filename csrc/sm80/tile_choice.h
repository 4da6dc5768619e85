// Which tile shape runs on a GPU. Host code.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace flash::sm80 {

// Calls launch(config) with the first tile shape from Config on of which blocks_per_sm thread
// blocks fit an SM's shared memory, with the last one if even one does. One thread block may use
// `shared_memory` bytes.
template <typename Config, typename Launch>
void launch_with_fitting_tile(int shared_memory, Launch launch) {
  // An SM has 1 KB more than one thread block may use, and keeps 1 KB for each.
  const auto fits = [&](int blocks) {
    return blocks * (Config::kSharedBytes + 1024) <= static_cast<size_t>(shared_memory) + 1024;
  };
  if (fits(Config::kIsLast ? 1 : Config::kBlocksPerSm)) {
    launch(Config());
  } else if constexpr (!Config::kIsLast) {
    launch_with_fitting_tile<typename Config::Next>(shared_memory, launch);
  } else {
    throw std::invalid_argument(
        "shared_memory: got " + std::to_string(shared_memory) +
        " bytes; accepted for head dimensions " + std::to_string(Config::kHeadDim) + " and " +
        std::to_string(Config::kHeadDimV) + ": at least " + std::to_string(Config::kSharedBytes));
  }
}

}  // namespace flash::sm80
