// SPDX-License-Identifier: Apache-2.0
#include "lengths.hpp"

#include "../program/words.hpp"
#include "../tasks/task_list.hpp"

#include <algorithm>

namespace compare {

namespace {

// compress has an answer for each token of a longer sequence, and all answers have to pass through
// one token; the `len` of listops is only a bound.
constexpr const char* kOfOneLength[] = {"compress", "listops"};

}  // namespace

std::optional<std::string> longer_spec(const std::string& spec, heed::Index factor) {
  const std::string name = tasks::task_name(spec);
  if (std::ranges::count(kOfOneLength, name) > 0) return std::nullopt;
  const tasks::Entry& entry = tasks::task_entry(name);
  const auto number = [&](const char* wanted) {
    return std::ranges::find_if(entry.numbers, [&](const auto& one) { return one.name == wanted; });
  };
  const auto len = number("len");
  if (len == entry.numbers.end()) return std::nullopt;
  std::string longer = name;
  char before = ':';
  double wanted = 0;
  for (const std::string& item : heed_program::split(spec.substr(name.size() + 1)))
    if (item.starts_with("len=")) wanted = std::stod(item.substr(4)) * double(factor);
  if (!(wanted > 0 && wanted <= len->most)) return std::nullopt;
  for (const std::string& item : heed_program::split(spec.substr(name.size() + 1))) {
    std::string changed = item;
    if (item.starts_with("len=")) changed = "len=" + std::to_string(heed::Index(wanted));
    if (item.starts_with("least="))
      changed = "least=" + std::to_string(heed::Index(wanted) / 2 + 1);
    longer += std::exchange(before, ',') + changed;
  }
  return longer;
}

}  // namespace compare
