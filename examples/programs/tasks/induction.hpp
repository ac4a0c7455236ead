// SPDX-License-Identifier: Apache-2.0
#pragma once

// Induction heads: what followed the special token?
//
//   a b c S d e f ... g S -> d
//
// n tokens are uniform over V - 2 tokens. One place p, uniform in [0, n - 2), gets the special token S; behind all stands
// S again, and asks for the token behind the first S. Token V - 2 is never used, as in the source.
//
// Published   n 30, V 20.
// Shrunken    the same; it is small as it was published.
// Difficulty  tokens between both S.
// Source      Fu et al. 2023, "Hungry Hungry Hippos" (H3), section 3.1 and table 1 (induction head), after Olsson et al.
//             2022, "In-context Learning and Induction Heads"; HazyResearch/safari, synthetics.py.
// Differs     The source trains on all tokens; here the loss counts the answer.

#include "parameters.hpp"

namespace tasks {

class Induction final : public Task {
 public:
  struct Options {
    Index len = 30, vocabulary = 20;
  };
  static Description<Options> describe();

  explicit Induction(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len + 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

}  // namespace tasks
