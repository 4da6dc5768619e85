// Division by a product and a shift (common/divisor.h): at the multiples of each divisor and one
// before them, up to 2^31 - 1, where a quotient changes.
#include "common/divisor.h"

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace flash;

std::mt19937 engine(1);

void check(const Divisor& divisor, int x) {
  if (divisor.quotient(x) == x / divisor.value) return;
  std::printf("%d / %d is not %d\n", x, divisor.value, divisor.quotient(x));
  std::exit(1);
}

int main() {
  for (int i = 0; i < 4000; ++i) {
    const bool is_small = i < 2000;
    const int value = is_small ? i + 1 : std::uniform_int_distribution<int>(1, INT_MAX)(engine);
    const Divisor divisor(value);
    for (const int x : {0, 1, INT_MAX - 1, INT_MAX}) check(divisor, x);
    std::uniform_int_distribution<int> multiples(1, INT_MAX / value);
    for (int j = 0; j < 200; ++j) {
      const int x = (j == 0 ? INT_MAX / value : multiples(engine)) * value;
      check(divisor, x);
      check(divisor, x - 1);
    }
  }
}
