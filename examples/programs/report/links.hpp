// SPDX-License-Identifier: Apache-2.0
#pragma once

// Draws which tokens of a text read which others: the tokens twice, in two columns, and bands from
// each reader on the left to the tokens that it reads on the right.

#include "drawing.hpp"

namespace heed_report {

struct LinkMap {
  struct Link {
    std::size_t reader, read;  // numbers of tokens
    double weight;  // |weight| is at most 1 if rows add up to one; below 0 in another colour
  };
  std::string name, title, note;
  std::vector<std::string> tokens;
  std::vector<Link> links;
};

// Most tokens in the picture: of a longer text the last tokens are drawn, and the links among them; the picture says so.
inline constexpr std::size_t kMostLinkTokens = 48;

// A link is drawn as wide as its weight, and at most as wide as a line of text is high. Links whose
// weight is not finite are left out; the picture says how many.
[[nodiscard]] Picture draw(const LinkMap& map);

// A token as pictures show it: spaces, line breaks and tabs as signs, long ones cut.
[[nodiscard]] std::string token_sign(const std::string& token);

}  // namespace heed_report
