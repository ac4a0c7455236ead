// SPDX-License-Identifier: Apache-2.0
#include "dyck.hpp"

#include "draws.hpp"

namespace tasks {

namespace {

// Draws one sequence; none if it is longer than allowed.
[[nodiscard]] std::optional<Sequence> draw_brackets(const Dyck::Options& o, Draws& draws) {
  Sequence sequence;
  std::vector<Index> open;  // positions of brackets that are open
  while (true) {
    const Index size = Index(sequence.inputs.size());
    bool opens = draws.chance(0.5);
    if (open.empty()) {
      if (!opens && size >= o.least) return sequence;
      if (!opens) continue;
    }
    if (size == o.len) return std::nullopt;
    if (Index(open.size()) == o.depth) opens = false;
    if (opens) {
      open.push_back(size);
      sequence.inputs.push_back(draws.below(o.kinds));
    } else {
      const Index closes = o.kinds + sequence.inputs[std::size_t(open.back())];
      sequence.answers.push_back({size - 1, closes, Index(open.size()), open.back(), 1});
      sequence.inputs.push_back(closes);
      open.pop_back();
    }
  }
}

}  // namespace

Description<Dyck::Options> Dyck::describe() {
  using O = Options;
  return {"dyck",
          "Closes nested brackets of several kinds",
          "Hewitt et al. 2020, Yao et al. 2021",
          "brackets that are open where one closes",
          {},
          {4, 4, 1, 64},
          {{"kinds", &O::kinds, 1, 4096, "kinds of brackets (k)"},
           {"depth", &O::depth, 1, 64, "most brackets that are open at a time (m)"},
           {"least", &O::least, 1, 16384, "fewest brackets of a sequence"},
           {"len", &O::len, 2, 16384, "most brackets of a sequence"}}};
}

Dyck::Dyck(const Options& options) : Task(checked_spec<Dyck>(options)), options_(options) {
  heed::require(options.least < options.len, "--task dyck: least is ", options.least,
                ", it must be less than len, ", options.len);
}

Sequence Dyck::sequence(const Place& place) const {
  Draws draws(place);
  while (true)
    if (std::optional<Sequence> drawn = draw_brackets(options_, draws)) return *std::move(drawn);
}

std::vector<Task::Test> Dyck::tests() const {
  const auto& [kinds, depth, least, len] = options_;
  std::vector<Test> tests;
  add_test<Dyck>(tests, "longer", {kinds, depth, len + 1, 2 * len});
  add_test<Dyck>(tests, "deeper", {kinds, depth + 2, least, len});
  return tests;
}

}  // namespace tasks
