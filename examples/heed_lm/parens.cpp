// SPDX-License-Identifier: Apache-2.0
#include "parens.hpp"

#include "text_random.hpp"

#include <heed/core/error.hpp>

#include <algorithm>
#include <string_view>
#include <vector>

namespace heed_lm {

namespace {

[[nodiscard]] Index id_of(char c) { return Index(std::string_view(kParenthesesAlphabet).find(c)); }

// Puts fillers between the characters of `text`. Stops at `limit` characters, behind which the text is cut anyway.
[[nodiscard]] std::string fill(const std::string& text, std::size_t limit, Draws& draws) {
  constexpr std::string_view fillers = "ab ";
  std::string filled;
  for (const char c : text) {
    if (filled.size() >= limit) break;
    filled += c;
    if (draws.chance(0.2)) filled += fillers[std::size_t(draws.below(3))];
  }
  return filled.substr(0, limit);
}

[[nodiscard]] std::string balanced(Index pairs, std::size_t limit, Draws& draws) {
  if (pairs == 0) return "";
  const Index left = draws.below(pairs);
  const std::string inner = balanced(left, limit, draws);
  const std::string outer = balanced(pairs - 1 - left, limit, draws);
  return fill('(' + inner + ')' + outer, limit, draws);
}

}  // namespace

ParenthesesTask::ParenthesesTask(std::uint64_t seed, Index max_pairs, Index max_len)
    : seed_(seed), max_pairs_(max_pairs), max_len_(max_len) {
  heed::require(max_pairs >= 1 && max_pairs <= 1000, "ParenthesesTask: max_pairs is ", max_pairs,
                ", must be 1 to 1000");
  heed::require(max_len >= 2, "--len is ", max_len, ", --task parens needs at least 2");
}

std::string ParenthesesTask::text(std::uint64_t i) const {
  Draws draws(seed_, Purpose::parentheses, i);
  const Index pairs = 1 + draws.below(max_pairs_);
  return balanced(pairs, std::size_t(max_len_ - 1), draws);
}

Batch ParenthesesTask::batch(std::uint64_t first, Index rows, Padding padding) const {
  heed::require(rows >= 1, "ParenthesesTask::batch: rows is ", rows, ", must be at least 1");
  std::vector<std::string> texts;
  Index len = 0;
  for (Index row = 0; row < rows; ++row) {
    texts.push_back(text(first + std::uint64_t(row)));
    len = std::max(len, Index(texts.back().size()));
  }
  Batch batch(rows, len, id_of(' '));
  if (padding == Padding::counted)
    std::fill(batch.targets.begin(), batch.targets.end(), id_of(' '));
  for (Index row = 0; row < rows; ++row) {
    std::string& next = texts[std::size_t(row)];
    std::transform(next.begin(), next.end(), batch.inputs.begin() + row * len, id_of);
    next = next.substr(1) + ' ';
    std::transform(next.begin(), next.end(), batch.targets.begin() + row * len, id_of);
  }
  return batch;
}

}  // namespace heed_lm
