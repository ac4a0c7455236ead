// SPDX-License-Identifier: Apache-2.0
// Four workers add numbers: each into a sum of its own, or, with the argument "race", all into one without a lock. A sanitizer
// of threads lets the first end with 0, and not the second.

#include <heed/core/parallel.hpp>

#include <cstdio>
#include <string_view>
#include <vector>

int main(int argc, char** argv) {
  const bool race = argc > 1 && std::string_view(argv[1]) == "race";
  long together = 0;
  std::vector<long> each(4);
  heed::run_workers(4, [&](int worker) {
    long& sum = race ? together : each[std::size_t(worker)];
    for (long i = 0; i < 1000; ++i) sum += i;
  });
  for (const long sum : each) together += sum;
  std::printf("%ld\n", together);
}
