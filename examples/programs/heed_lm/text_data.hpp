// SPDX-License-Identifier: Apache-2.0
#pragma once

// A text of n tokens, in two parts without overlap:
//
//   training    tokens [0, n - h)     random windows
//   validation  tokens [n - h, n)     all windows, in order
//
// h is the given fraction of n, rounded, at least len + 1; 0 where the fraction is. A window is len inputs and, as the target
// of each, the token that follows it: len + 1 tokens, all of one part.

#include "text_batch.hpp"

#include <cstdint>
#include <vector>

namespace heed_lm {

class TextData {
 public:
  // Throws std::invalid_argument unless each part has room for a window, or nothing is held out.
  TextData(std::vector<Index> tokens, Index len, double held_out);

  [[nodiscard]] Index len() const { return len_; }
  [[nodiscard]] Index training_tokens() const { return training_; }
  [[nodiscard]] Index validation_tokens() const { return Index(tokens_.size()) - training_; }

  // Windows at random places, (rows, len), a function of seed and step.
  [[nodiscard]] Batch training_batch(Index rows, std::uint64_t seed, std::uint64_t step) const;

  // The number of windows for validation. They follow each other: each token but the first is a target once.
  [[nodiscard]] Index validation_windows() const;
  // The windows from `first` on, at most `rows`. The last window may be shorter: it is filled up
  // with inputs 0 that have no target.
  [[nodiscard]] Batch validation_batch(Index first, Index rows) const;

 private:
  void copy_window(Index from, Index count, Index row, Batch& batch) const;

  std::vector<Index> tokens_;
  Index len_, training_ = 0;
};

}  // namespace heed_lm
