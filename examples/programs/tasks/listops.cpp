// SPDX-License-Identifier: Apache-2.0
#include "listops.hpp"

#include "draws.hpp"

#include <algorithm>

namespace tasks {

namespace {

// Draws one list, a level at a time.
class Lists {
 public:
  Lists(const ListOps::Options& options, Draws& draws) : options_(options), draws_(draws) {}

  // The value of a list that begins on level `level`, from 1. Appends its tokens; when they are too
  // many, the rest is left out.
  Index list(Index level) {
    deepest_ = std::max(deepest_, level);
    const Index op = ListOps::min + draws_.below(4),
                count = draws_.between(2, options_.arguments + 1);
    tokens_.push_back(op);
    std::vector<Index> values;
    for (Index i = 0; i < count && fits(); ++i) {
      const bool lowest = level + 1 >= options_.depth;
      if (!lowest && draws_.chance(options_.lists)) {
        values.push_back(list(level + 1));
      } else {
        values.push_back(draws_.below(10));
        tokens_.push_back(values.back());
      }
    }
    tokens_.push_back(ListOps::close);
    return value_of(op, std::move(values));
  }
  [[nodiscard]] bool fits() const { return Index(tokens_.size()) <= options_.len; }
  [[nodiscard]] Index deepest() const { return deepest_; }
  [[nodiscard]] std::vector<Index> tokens() && { return std::move(tokens_); }

 private:
  [[nodiscard]] static Index value_of(Index op, std::vector<Index> values) {
    if (values.empty()) return 0;  // the list is empty only where it is dropped
    std::sort(values.begin(), values.end());
    const std::size_t count = values.size();
    if (op == ListOps::min) return values.front();
    if (op == ListOps::max) return values.back();
    if (op == ListOps::med) return (values[(count - 1) / 2] + values[count / 2]) / 2;
    return std::accumulate(values.begin(), values.end(), Index(0)) % 10;
  }

  const ListOps::Options& options_;
  Draws& draws_;
  std::vector<Index> tokens_;
  Index deepest_ = 0;
};

}  // namespace

Description<ListOps::Options> ListOps::describe() {
  using O = Options;
  return {"listops",
          "Computes nested lists of MIN, MAX, median and sum modulo 10",
          "Nangia and Bowman 2018",
          "nesting of the lists",
          {},
          {4, 4, 48, 0.4},
          {{"depth", &O::depth, 2, 64, "levels, digits at the lowest among them"},
           {"arguments", &O::arguments, 2, 64, "most arguments of a list"},
           {"len", &O::len, 4, 65536, "most tokens of a list"},
           {"lists", &O::lists, 0, 1, "probability that an argument is a list"}}};
}

ListOps::ListOps(const Options& options) : Task(checked_spec<ListOps>(options)), options_(options) {
  // The mean number of lists per list; from 1 on they hardly ever end in time.
  const double grows = options.lists * double(2 + options.arguments) / 2;
  heed::require(grows <= 1.5, "--task listops: lists is ", options.lists, " and arguments is ",
                options.arguments, ", which make ", grows,
                " lists for each list; it must be at most 1.5");
}

Sequence ListOps::sequence(const Place& place) const {
  Draws draws(place);
  while (true) {
    Lists lists(options_, draws);
    const Index value = lists.list(1);
    if (!lists.fits()) continue;
    const Index depth = lists.deepest();
    Sequence sequence{std::move(lists).tokens(), {}};
    sequence.answers.push_back({Index(sequence.inputs.size()), value, depth, 0, 0});
    sequence.inputs.push_back(equals);
    return sequence;
  }
}

}  // namespace tasks
