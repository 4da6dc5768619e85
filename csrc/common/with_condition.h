// Branches of which each is compiled apart.
#pragma once

#include <type_traits>

namespace flash {

// Calls function(std::true_type) if the condition holds, else function(std::false_type). kMayHold
// false: it never does.
template <bool kMayHold, typename Function>
__device__ void with_condition(bool condition, Function function) {
  if (kMayHold && condition) {
    function(std::bool_constant<kMayHold>());
  } else {
    function(std::false_type());
  }
}

}  // namespace flash
