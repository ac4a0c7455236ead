// SPDX-License-Identifier: Apache-2.0
#pragma once

// Modular addition, on which models learn the rule long after the examples ("grokking").
//
//   a + b = -> c          c = a + b modulo p
//
// All p^2 pairs (a, b) are shuffled once, by the seed `split`. The first `share` of them is for training: each sequence
// draws one of these evenly. The first half of the others is for validation and the second half for tests, in order.
//
// Published   p 97, half of the pairs for training.
// Shrunken    p 31, share 0.7.
// Difficulty  1 where a + b reaches p, else 0.
// Source      Power et al. 2022, "Grokking: Generalization Beyond Overfitting on Small Algorithmic Datasets", section 3
//             and appendix A.1.
// Differs     The source's epochs show every training pair once; here pairs are drawn with replacement. It has one held-out
//             part; here it is halved.

#include "parameters.hpp"

namespace tasks {

class ModularAddition final : public Task {
 public:
  struct Options {
    Index modulus = 97;
    double share = 0.5;
    Index split = 1;
  };
  static Description<Options> describe();

  explicit ModularAddition(const Options& options);
  // Numbers below the modulus, then + and =.
  [[nodiscard]] Index vocabulary() const override { return options_.modulus + 2; }
  [[nodiscard]] Index len() const override { return 4; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
  std::vector<Index> pairs_;  // p a + b, shuffled
  Index training_ = 0, validation_ = 0;
};

}  // namespace tasks
