// SPDX-License-Identifier: Apache-2.0
#pragma once

// Balanced parentheses with fillers: the small task of the dialectical attention notes.
//
//   balanced(0) = ""      balanced(n) = fill("(" balanced(l) ")" balanced(n - 1 - l)),  l in [0, n)
//
// fill() puts one of "ab " behind each character with probability 1/5, on every level anew, so that
// fillers are more frequent where parentheses are deep. An example has 1 to max_pairs pairs, all
// numbers uniform; it is cut after max_len - 1 characters. The target of each character is the next
// one, that of the last a space. A batch is filled up with spaces.
//
// As in the notes: the alphabet and its ids (no "c" is ever drawn), the distribution of texts, and
// that targets behind a text are spaces, which the loss counts. These are easy to predict: the mean
// loss falls with the share of padding. Padding::ignored leaves them out; then the loss compares
// between batches.
// Differs in the random numbers: an example is a function of seed and number alone, while the notes
// draw one from another without a seed; so runs can be repeated and variants see the same examples.

#include "text_batch.hpp"

#include <cstdint>
#include <string>

namespace heed_lm {

// In the order of ids; CharacterTokenizer(kParenthesesAlphabet) encodes and decodes.
inline constexpr const char* kParenthesesAlphabet = "()abc ";

enum class Padding { counted, ignored };

class ParenthesesTask {
 public:
  // max_pairs from 1 to 1000, max_len at least 2.
  explicit ParenthesesTask(std::uint64_t seed, Index max_pairs = 6, Index max_len = 96);

  // Example number i.
  [[nodiscard]] std::string text(std::uint64_t i) const;
  // Examples first to first + rows - 1 as rows, as long as the longest of them.
  [[nodiscard]] Batch batch(std::uint64_t first, Index rows,
                            Padding padding = Padding::counted) const;

 private:
  std::uint64_t seed_;
  Index max_pairs_, max_len_;
};

}  // namespace heed_lm
