// SPDX-License-Identifier: Apache-2.0
#pragma once

// Splits a text into the pieces within which GPT-2 merges bytes: words with the space before them, numbers, other signs,
// white space.
//
// Source  Radford et al. (2019), "Language models are unsupervised multitask learners", and the
//         pattern published with its model. Differs in bytes that are not UTF-8: here they stay as
//         they are, each run of them a piece of its own.
// Letters and numbers are those of the Unicode version of the installed PCRE2.

#include <memory>
#include <string_view>
#include <vector>

namespace heed_lm {

class BpeSplit {
 public:
  BpeSplit();
  ~BpeSplit();

  // The pieces in order; together they are the text.
  [[nodiscard]] std::vector<std::string_view> pieces(std::string_view text) const;

 private:
  class Pattern;
  std::unique_ptr<Pattern> pattern_;
};

}  // namespace heed_lm
