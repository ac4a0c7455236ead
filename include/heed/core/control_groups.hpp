// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads how many processors and how much memory the control groups of this process let it use. A
// container on a machine of 64 processors may have two of them, and OpenMP counts 64.
//
//               version 2                     version 1
//   mount       /sys/fs/cgroup                /sys/fs/cgroup/cpu, /sys/fs/cgroup/memory
//   processors  cpu.max: "150000 100000",     cpu.cfs_quota_us, -1 without quota, and cpu.cfs_period_us
//               microseconds in each period,
//               or "max 100000"
//   memory      memory.max: bytes, or "max"   memory.limit_in_bytes
//
// /proc/self/cgroup names the group. The smallest limit among it and all groups above it holds.
// Inside a container the name may be that of the machine outside, which does not exist below the
// mount; the container's own group is then the mount itself. Files that are missing, as on other
// systems than Linux, or that hold something else, are no limit. Nothing is allocated.

#include <heed/core/config.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <string_view>
#include <system_error>

namespace heed {
inline namespace HEED_ABI {

inline constexpr int kNoQuota = std::numeric_limits<int>::max();
inline constexpr long long kNoMemoryLimit = std::numeric_limits<long long>::max();

namespace detail {

// Returns the text before the first `end`, and takes both off `text`.
[[nodiscard]] inline std::string_view take_until(std::string_view& text, char end) noexcept {
  const std::string_view part(text.data(), std::min(text.find(end), text.size()));
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return part;
}

struct GroupPath {
  const char* root;        // stands before all paths
  const char* mount;       // the folder of the groups
  std::string_view group;  // "/a/b"; empty for the mount itself
};

// The beginning of a file, as much as fits the buffer.
class FileStart {
 public:
  FileStart(const GroupPath& folder, const char* name) noexcept {
    char path[4352];
    std::size_t length = 0;
    for (const std::string_view part :
         {std::string_view(folder.root), std::string_view(folder.mount), folder.group,
          std::string_view("/"), std::string_view(name)}) {
      if (part.size() >= sizeof path - length) return;
      length += part.copy(path + length, part.size());
    }
    path[length] = 0;
    std::FILE* const file = std::fopen(path, "re");
    if (!file) return;
    size_ = std::fread(text_, 1, sizeof text_, file);
    std::fclose(file);
  }
  [[nodiscard]] std::string_view text() const noexcept { return {text_, size_}; }

 private:
  char text_[8192];
  std::size_t size_ = 0;
};

// The positive number that the text stands for; 0 for any other text.
[[nodiscard]] inline long long number_of(std::string_view text) noexcept {
  long long value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && rest == end && value > 0 ? value : 0;
}

// Number of processors, rounded up, for a quota of microseconds in each period, as the files write them.
[[nodiscard]] inline int processors_of(std::string_view quota, std::string_view period) noexcept {
  const long long time = number_of(quota), of = number_of(period);
  if (time == 0 || of == 0) return kNoQuota;
  return int(std::min<long long>(1 + (time - 1) / of, kNoQuota));
}

// The processor quota of one group, of version 1 or 2.
[[nodiscard]] inline int quota_of_group(const GroupPath& at) noexcept {
  const FileStart both(at, "cpu.max"), quota(at, "cpu.cfs_quota_us"),
      period(at, "cpu.cfs_period_us");
  std::string_view pair = both.text(), first = quota.text(), second = period.text();
  const std::string_view time = take_until(pair, ' ');
  return std::min(processors_of(time, take_until(pair, '\n')),
                  processors_of(take_until(first, '\n'), take_until(second, '\n')));
}
// The memory limit of one group in bytes, of version 1 or 2.
[[nodiscard]] inline long long bytes_of_group(const GroupPath& at) noexcept {
  long long least = kNoMemoryLimit;
  for (const char* const name : {"memory.max", "memory.limit_in_bytes"}) {
    const FileStart file(at, name);
    std::string_view text = file.text();
    if (const long long bytes = number_of(take_until(text, '\n')); bytes > 0)
      least = std::min(least, bytes);
  }
  return least;
}

// The smallest limit of a group and of all groups above it.
template <class Limit>
[[nodiscard]] auto least_of_groups(GroupPath at, Limit&& limit_of) noexcept {
  if (at.group.find("/..") != at.group.npos) at.group = "";  // it stands outside of the mount
  auto least = limit_of(at);
  while (!at.group.empty()) {
    const std::size_t above = at.group.rfind('/');
    at.group = at.group.substr(0, above == at.group.npos ? 0 : above);
    least = std::min(least, limit_of(at));
  }
  return least;
}

// The smallest limit of this process's groups, of version 1 or 2; `mount` is the folder of version 1.
template <class Limit>
[[nodiscard]] auto least_of_process(const char* root, std::string_view controller,
                                    const char* mount, Limit&& limit_of) noexcept {
  const FileStart groups({root, "/proc/self", ""}, "cgroup");
  std::string_view version_1 = "", version_2 = "", text = groups.text();
  while (!text.empty()) {  // "4:cpu,cpuacct:/GROUP" or "0::/GROUP"
    std::string_view line = take_until(text, '\n');
    (void)take_until(line, ':');
    std::string_view controllers = take_until(line, ':');
    if (controllers.empty()) version_2 = line;
    while (!controllers.empty())
      if (take_until(controllers, ',') == controller) version_1 = line;
  }
  return std::min(least_of_groups({root, "/sys/fs/cgroup", version_2}, limit_of),
                  least_of_groups({root, mount, version_1}, limit_of));
}

}  // namespace detail

// Number of processors, rounded up; kNoQuota without a quota. `root` stands before the paths of all files, for tests.
[[nodiscard]] inline int cpu_quota(const char* root = "") noexcept {
  return detail::least_of_process(root, "cpu", "/sys/fs/cgroup/cpu", detail::quota_of_group);
}
// Bytes of memory; kNoMemoryLimit without a limit.
[[nodiscard]] inline long long memory_quota(const char* root = "") noexcept {
  return detail::least_of_process(root, "memory", "/sys/fs/cgroup/memory", detail::bytes_of_group);
}

}  // namespace HEED_ABI
}  // namespace heed
