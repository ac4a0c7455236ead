// SPDX-License-Identifier: Apache-2.0
#pragma once

// ListOps: nested lists with an operator each.
//
//   [MAX 2 9 [MIN 4 7 ] 0 ] = -> 9
//
// A list has an operator, drawn evenly from MIN, MAX, MED and SM, and 2 to `arguments` arguments, their number uniform.
// An argument is a list with probability `lists`, else a digit, uniform; at the lowest of `depth` levels all are digits.
// MED is the median, rounded down between the two middle ones of an even number; SM is the sum modulo 10. A list of more
// than `len` tokens is thrown away. The token = asks for the value.
//
// Published   depth 20, arguments up to 5, lists 0.25.
// Shrunken    depth 4, arguments up to 4, lists 0.4, at most 48 tokens.
// Difficulty  depth of the nested lists: 1 for a list of digits.
// Source      Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", section 2; nyu-mll/spinn,
//             listops/make_data.py.
// Differs     The source also binarises the tree with parentheses, and drops trivial sequences afterwards; here the root
//             is always a list. The bound `len` is ours.

#include "parameters.hpp"

namespace tasks {

class ListOps final : public Task {
 public:
  struct Options {
    Index depth = 20, arguments = 5, len = 512;
    double lists = 0.25;
  };
  static Description<Options> describe();

  // Tokens 0 to 9 are digits.
  static constexpr Index min = 10, max = 11, med = 12, sm = 13, close = 14, equals = 15;

  explicit ListOps(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return 16; }
  [[nodiscard]] Index len() const override { return options_.len + 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

}  // namespace tasks
