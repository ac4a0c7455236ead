// SPDX-License-Identifier: Apache-2.0
#pragma once

// The amount of memory that this process may use.

#include <heed/core/control_groups.hpp>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace heed_program {

// Bytes: the smallest of the machine's memory, of the limits of the process (ulimit -v, -d) and of its control groups.
[[nodiscard]] inline double memory_limit() {
  double least = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      least = std::min(least, double(limit.rlim_cur));
  }
  return std::min(least, double(heed::memory_quota()));
}

// "1234 GiB", "12.3 GiB", "0.012 GiB"
[[nodiscard]] inline std::string gib_text(double bytes) {
  char text[64];
  const double gib = bytes / double(1 << 30);
  std::snprintf(text, sizeof text, gib < 1000 ? "%.3g GiB" : "%.0f GiB", gib);
  return text;
}

}  // namespace heed_program
