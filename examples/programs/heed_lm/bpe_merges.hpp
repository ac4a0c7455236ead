// SPDX-License-Identifier: Apache-2.0
#pragma once

// Byte-pair merging, in rounds. A round looks for the earliest rule that some pair of neighbours has, and merges all
// pairs of this rule into one token each, from left to right. The rounds end when no pair has a rule.
//
// Cost  n log n for n tokens: a heap of pairs, and links from token to token.

#include <heed/core/config.hpp>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace heed_lm {

using heed::Index;

class BpeMerges {
 public:
  struct Rule {
    Index left, right, merged;
  };

  // Appends a rule; returns false if the pair has one already.
  [[nodiscard]] bool add(Rule rule);
  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }

  // The token `merged` of each rule must be longer than `left` and `right`, as text: then no rule
  // applies to its own result.
  void apply(std::vector<Index>& ids) const;

 private:
  class Chain;
  [[nodiscard]] std::optional<std::size_t> rank(Index left, Index right) const;

  std::vector<Rule> rules_;                              // in the order of application
  std::unordered_map<std::uint64_t, std::size_t> rank_;  // by pair: its place in rules_
};

}  // namespace heed_lm
