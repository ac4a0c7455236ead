// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dyck-(k, m): well-nested brackets of k kinds, at most m of them open at a time.
//
//   ( [ ( -> ) ) -> ] ] -> ) ) { -> } }
//
// Drawn a bracket at a time. With none open: with probability 1/2 the sequence ends, else a bracket opens. With m open:
// one closes. Else one opens or closes evenly. What opens is of a uniform kind. An end in front of `least` brackets is
// drawn again; a sequence of more than `len` brackets is thrown away. Wherever the next bracket closes, its kind is
// asked for: the kind of the innermost bracket that is open.
//
// Published   k 2, 8, 32, 128, m 3 or 5; for m = 3 up to 84, for m = 5 up to 180 tokens, tests from there to twice as many.
// Shrunken    k 4, m 4, up to 64 brackets.
// Tests       "longer": len + 1 to 2 len brackets, as in the source; "deeper": m + 2 instead of m.
// Difficulty  number of brackets that are open where one closes: beyond m it is deeper than in training.
// Source      Hewitt et al. 2020, "RNNs can generate bounded hierarchical languages with optimal memory", section 5;
//             john-hewitt/dyckkm-learning. Yao et al. 2021, "Self-Attention Networks Can Process Bounded Hierarchical
//             Languages", k 8, m 10.
// Differs     The source trains on all tokens and then asks for the share of the right bracket in
//             the probability of all closing brackets. Here the loss counts closing brackets, which
//             trains this share itself. `least` and `len` do not count the end. "deeper" is ours.

#include "parameters.hpp"

namespace tasks {

class Dyck final : public Task {
 public:
  struct Options {
    Index kinds = 8, depth = 5, least = 1, len = 180;
  };
  static Description<Options> describe();

  explicit Dyck(const Options& options);
  // Kind i opens with token i and closes with kinds + i; the end, token 2 kinds, fills up rows.
  [[nodiscard]] Index vocabulary() const override { return 2 * options_.kinds + 1; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] std::vector<Test> tests() const override;
  [[nodiscard]] Index padding() const override { return 2 * options_.kinds; }

 private:
  Options options_;
};

}  // namespace tasks
