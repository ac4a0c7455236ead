// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lists of c.h, which are a pointer and a count. A count that was never set could make the library
// read any memory: before a list is read, its count must be one that the call can have.

#include <heed/core/error.hpp>
#include <heed/core/view.hpp>

#include <cstddef>
#include <optional>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// The most entries of a list, as the end of a sentence: `before` most `behind`.
struct ListLimit {
  const char* before;
  Index most;
  const char* behind = "";
};

// The limit of lists whose length does not follow from the call's sizes.
inline constexpr ListLimit kAnyList{"it must have at most ", 4096};

inline void require_list(const void* list, std::size_t count, const char* name,
                         const ListLimit& limit, const char* where) {
  require(list != nullptr || count == 0, where, ": ", name, " has ", count,
          " entries and a null pointer to them");
  require(count <= std::size_t(limit.most), where, ": ", name, " has ", count, " entries, ",
          limit.before, limit.most, limit.behind);
}

// The entries of a list; none where the list is a null pointer.
template <class Entry, class Given>
[[nodiscard]] std::optional<std::vector<Entry>> copy_of_list(const Given* list, std::size_t count,
                                                             const char* name,
                                                             const ListLimit& limit,
                                                             const char* where) {
  require_list(list, count, name, limit, where);
  if (list == nullptr) return {};
  return std::vector<Entry>(list, list + count);
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
