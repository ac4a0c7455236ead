// SPDX-License-Identifier: Apache-2.0
#pragma once

// Balanced parentheses with fillers: the small task of the dialectical attention notes.
//
//   balanced(0) = ""      balanced(n) = fill("(" balanced(l) ")" balanced(n - 1 - l)),  l in [0, n)
//
// fill() puts one of "ab " behind each character with probability 1/5, on every level again, so that fillers are more
// frequent where parentheses are deep. An example has 1 to `pairs` pairs, all numbers uniform; it is cut after len - 1
// characters. The target of each character is the next one, that of the last a space. A batch is filled up with spaces.
//
// Published   6 pairs, len 96.
// Shrunken    the same; it is small as it was published.
// Difficulty  number of open parentheses.
// Source      the notes: the alphabet and its ids (no "c" is ever drawn), the distribution of texts, and
//             that targets behind a text are spaces, which the loss counts. These are easy to predict: the mean
//             loss falls with the share of padding. padding=0 leaves them out; then the loss compares
//             between batches. Most characters are random: no model answers all of them.
// Differs     in the random numbers: an example is a function of seed and number alone, while the notes
//             draw one from another without a seed; so runs can be repeated and variants see the same examples.

#include "parameters.hpp"

namespace tasks {

// The alphabet in the order of ids.
inline constexpr const char* kParenthesesAlphabet = "()abc ";

class Parens final : public Task {
 public:
  struct Options {
    Index len = 96, pairs = 6, padding = 1;
  };
  static Description<Options> describe();

  explicit Parens(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return 6; }
  [[nodiscard]] Index len() const override { return options_.len - 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] Index padding() const override { return 5; }
  [[nodiscard]] Index padding_target() const override { return options_.padding ? 5 : kNoAnswer; }

  // The characters of a sequence.
  [[nodiscard]] std::string text(const Place& place) const;

 private:
  Options options_;
};

}  // namespace tasks
