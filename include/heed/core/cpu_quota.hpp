// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU quota of this process: how many processors its control groups let it use. A container on a machine of 64
// processors may have two of them, and OpenMP counts 64.
//
//   version 2   /sys/fs/cgroup/GROUP/cpu.max: "150000 100000", microseconds in each period, or "max 100000"
//   version 1   /sys/fs/cgroup/cpu/GROUP/cpu.cfs_quota_us, -1 without quota, and cpu.cfs_period_us
//
// /proc/self/cgroup names the GROUP. The least quota holds of it and of all groups above it. A container may read its name on
// the machine outside, which is not found below the mount; the container's own group is then the mount itself.
// Files that are missing, as on other systems than Linux, or that hold something else, are no quota. Nothing is allocated.

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

namespace detail {

// What stands in `text` before the first `end`; both are taken off it.
[[nodiscard]] inline std::string_view take_until(std::string_view& text, char end) noexcept {
  const std::string_view part(text.data(), std::min(text.find(end), text.size()));
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return part;
}

struct GroupPath {
  const char* root;        // before all paths
  const char* mount;       // of the groups
  std::string_view group;  // "/a/b"; empty for the mount itself
};

// The beginning of a file of a folder, as much as there is room for.
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

// Processors, rounded up, of a quota of microseconds in each period, as the files write them.
[[nodiscard]] inline int processors_of(std::string_view quota, std::string_view period) noexcept {
  const auto number = [](std::string_view digits) {
    long long value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [rest, error] = std::from_chars(digits.data(), end, value);
    return error == std::errc{} && rest == end ? value : 0;
  };
  const long long time = number(quota), of = number(period);
  if (time <= 0 || of <= 0) return kNoQuota;
  return int(std::min<long long>(1 + (time - 1) / of, kNoQuota));
}

// The quota of one group, of either version.
[[nodiscard]] inline int quota_of_group(const GroupPath& at) noexcept {
  const FileStart both(at, "cpu.max"), quota(at, "cpu.cfs_quota_us"),
      period(at, "cpu.cfs_period_us");
  std::string_view pair = both.text(), first = quota.text(), second = period.text();
  const std::string_view time = take_until(pair, ' ');
  return std::min(processors_of(time, take_until(pair, '\n')),
                  processors_of(take_until(first, '\n'), take_until(second, '\n')));
}
// The least one of a group and of all above it.
[[nodiscard]] inline int quota_of_groups(GroupPath at) noexcept {
  if (at.group.find("/..") != at.group.npos) at.group = "";  // it stands outside of the mount
  int least = quota_of_group(at);
  while (!at.group.empty()) {
    const std::size_t above = at.group.rfind('/');
    at.group = at.group.substr(0, above == at.group.npos ? 0 : above);
    least = std::min(least, quota_of_group(at));
  }
  return least;
}

}  // namespace detail

// Processors, rounded up; kNoQuota without one. root: stands before the paths of all files, for tests.
[[nodiscard]] inline int cpu_quota(const char* root = "") noexcept {
  using detail::take_until;
  const detail::FileStart groups({root, "/proc/self", ""}, "cgroup");
  std::string_view version_1 = "", version_2 = "", text = groups.text();
  while (!text.empty()) {  // "4:cpu,cpuacct:/GROUP" or "0::/GROUP"
    std::string_view line = take_until(text, '\n');
    (void)take_until(line, ':');
    std::string_view controllers = take_until(line, ':');
    if (controllers.empty()) version_2 = line;
    while (!controllers.empty())
      if (take_until(controllers, ',') == "cpu") version_1 = line;
  }
  return std::min(detail::quota_of_groups({root, "/sys/fs/cgroup", version_2}),
                  detail::quota_of_groups({root, "/sys/fs/cgroup/cpu", version_1}));
}

}  // namespace HEED_ABI
}  // namespace heed
