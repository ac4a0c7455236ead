// SPDX-License-Identifier: Apache-2.0
#include "parens.hpp"

#include "draws.hpp"

#include <string_view>

namespace tasks {

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

Description<Parens::Options> Parens::describe() {
  using O = Options;
  return {"parens",
          "Goes on with balanced parentheses between fillers",
          "the dialectical attention notes",
          "parentheses that are open",
          {},
          {},
          {{"len", &O::len, 2, 1 << 20, "characters of a sequence, and the one behind"},
           {"pairs", &O::pairs, 1, 1000, "most pairs of parentheses"},
           {"padding", &O::padding, 0, 1,
            "1: the loss counts the spaces behind a text; 0: it does not"}}};
}

Parens::Parens(const Options& options) : Task(checked_spec<Parens>(options)), options_(options) {}

std::string Parens::text(const Place& place) const {
  constexpr std::uint64_t kPurpose = 103;
  Draws draws(place.seed, kPurpose, (std::uint64_t(place.split) << 62) + place.index);
  const Index pairs = 1 + draws.below(options_.pairs);
  return balanced(pairs, std::size_t(options_.len - 1), draws);
}

Sequence Parens::sequence(const Place& place) const {
  const std::string characters = text(place);
  Sequence sequence;
  Index open = 0;
  for (const char c : characters) {
    open += c == '(' ? 1 : c == ')' ? -1 : 0;
    const Index t = Index(sequence.inputs.size());
    const bool last = std::size_t(t + 1) == characters.size();
    sequence.inputs.push_back(id_of(c));
    sequence.answers.push_back({t, id_of(last ? ' ' : characters[std::size_t(t + 1)]), open, 0, 0});
  }
  return sequence;
}

}  // namespace tasks
