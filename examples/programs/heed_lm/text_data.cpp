// SPDX-License-Identifier: Apache-2.0
#include "text_data.hpp"

#include "text_random.hpp"

#include <heed/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace heed_lm {

TextData::TextData(std::vector<Index> tokens, Index len, double held_out)
    : tokens_(std::move(tokens)), len_(len) {
  heed::require(len >= 1, "TextData: len is ", len, ", must be at least 1");
  heed::require(held_out >= 0 && held_out < 1, "TextData: held_out is ", held_out,
                ", must be in [0, 1)");
  const Index count = Index(tokens_.size());
  const bool holds_out = held_out > 0;
  // count / 2 <= len instead of count < 2 (len + 1), which may overflow.
  heed::require((holds_out ? count / 2 : count) > len, "the text has ", count,
                " tokens, sequences of ", len, " tokens (--len) need ", len, " + 1 to train on",
                holds_out ? " and as many held out" : "");
  const Index validation =
      holds_out ? std::max(Index(std::llround(held_out * double(count))), len + 1) : 0;
  training_ = count - validation;
  heed::require(training_ > len, "the text has ", count, " tokens, ", validation,
                " are held out (--held-out), the other ", training_,
                " must be more than the tokens of a sequence, ", len, " (--len)");
}

Batch TextData::training_batch(Index rows, std::uint64_t seed, std::uint64_t step) const {
  heed::require(rows >= 1, "TextData::training_batch: rows is ", rows, ", must be at least 1");
  Draws draws(seed, Purpose::windows, step);
  Batch batch(rows, len_, 0);
  for (Index row = 0; row < rows; ++row)
    copy_window(draws.below(training_ - len_), len_, row, batch);
  return batch;
}

Index TextData::validation_windows() const {
  const Index targets = std::max<Index>(0, validation_tokens() - 1);
  return targets / len_ + (targets % len_ != 0);
}

Batch TextData::validation_batch(Index first, Index rows) const {
  heed::require(first >= 0 && first < validation_windows(), "TextData::validation_batch: first is ",
                first, ", but there are ", validation_windows(), " windows");
  heed::require(rows >= 1, "TextData::validation_batch: rows is ", rows, ", must be at least 1");
  Batch batch(std::min(rows, validation_windows() - first), len_, 0);
  for (Index row = 0; row < batch.rows; ++row) {
    const Index from = training_ + (first + row) * len_;
    copy_window(from, std::min(len_, Index(tokens_.size()) - 1 - from), row, batch);
  }
  return batch;
}

void TextData::copy_window(Index from, Index count, Index row, Batch& batch) const {
  const auto begin = tokens_.begin() + from;
  std::copy(begin, begin + count, batch.inputs.begin() + row * len_);
  std::copy(begin + 1, begin + 1 + count, batch.targets.begin() + row * len_);
}

}  // namespace heed_lm
