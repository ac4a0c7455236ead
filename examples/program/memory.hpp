// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much memory this process may use.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

namespace heed_program {

namespace detail {

// The least number in files of this name in `folder` and all above it, up to `mount`. What holds no number, as "max", and
// files that are missing are no limit. A container may read its group's name on the machine outside, which is not found below
// the mount; its own group is then the mount itself.
[[nodiscard]] inline double least_above(const std::string& mount, const std::string& folder,
                                        const char* name, double least) {
  for (std::string group = folder;;) {
    double limit = 0;
    if (std::ifstream(mount + group + "/" + name) >> limit) least = std::min(least, limit);
    if (group.empty()) return least;
    const std::size_t above = group.rfind('/');
    group.resize(above == std::string::npos ? 0 : above);
  }
}

}  // namespace detail

// Bytes: the least of the machine's memory, of the limits of the process (ulimit -v, -d) and of its control groups.
[[nodiscard]] inline double memory_limit() {
  double least = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      least = std::min(least, double(limit.rlim_cur));
  }
  std::ifstream groups(
      "/proc/self/cgroup");  // lines "4:memory:/GROUP", or "0::/GROUP" of version 2
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      group = line.substr(second + 1);
    if (controllers.empty())
      least = detail::least_above("/sys/fs/cgroup", group, "memory.max", least);
    if (("," + controllers + ",").find(",memory,") != std::string::npos)
      least = detail::least_above("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes", least);
  }
  return least;
}

// "1234 GiB", "12.3 GiB", "0.012 GiB"
[[nodiscard]] inline std::string gib_text(double bytes) {
  char text[64];
  const double gib = bytes / double(1 << 30);
  std::snprintf(text, sizeof text, gib < 1000 ? "%.3g GiB" : "%.0f GiB", gib);
  return text;
}

}  // namespace heed_program
