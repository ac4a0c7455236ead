// SPDX-License-Identifier: Apache-2.0
#include "links.hpp"

#include <heed/core/utf8.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace heed_report {

namespace {

constexpr double kLeft = 116, kRight = kWidth - 116;  // begin and end of bands
constexpr double kRow = 14;                           // height of a token's line
constexpr double kWidest = 12;                        // width of a band for a weight of 1
constexpr std::size_t kMostCharacters = 14;           // shown of a token at most

}  // namespace

std::string token_sign(const std::string& token) {
  constexpr std::pair<char, const char*> signs[] = {
      {' ', "\u2423"}, {'\n', "\u21B5"}, {'\t', "\u21E5"}};
  std::string shown;
  std::size_t count = 0;
  for (std::size_t at = 0; at < token.size(); ++count) {
    if (count == kMostCharacters) return shown + "\u2026";
    const std::size_t bytes = std::max<std::size_t>(1, heed::utf8_step(token, at).bytes);
    std::string character = token.substr(at, bytes);
    for (const auto& [plain, sign] : signs)
      if (character == std::string(1, plain)) character = sign;
    shown += character;
    at += bytes;
  }
  return shown;
}

Picture draw(const LinkMap& map) {
  Drawing drawing;
  const std::size_t count = map.tokens.size(), first = count - std::min(count, kMostLinkTokens);
  double top = drawing.paragraph(0, map.title, "title", 14) + kLine;
  drawing.text({kLeft - 6, top}, "token", Anchor::end, "note");
  drawing.text({kRight + 6, top}, "reads", Anchor::start, "note");
  top += 6;
  const auto middle = [&](std::size_t token) { return top + kRow * (double(token - first) + 0.5); };
  std::size_t left_out = 0, before = 0;
  bool negative = false;
  // Light bands come first, so that they hide no heavier one.
  std::vector<LinkMap::Link> links;
  for (const LinkMap::Link& link : map.links) {
    const bool drawn = std::isfinite(link.weight);
    left_out += !drawn;
    if (!drawn || link.reader < first) continue;
    if (link.read < first)
      ++before;
    else
      links.push_back(link);
  }
  std::stable_sort(links.begin(), links.end(), [](const auto& a, const auto& b) {
    return std::abs(a.weight) < std::abs(b.weight);
  });
  for (const LinkMap::Link& link : links) {
    negative = negative || link.weight < 0;
    const double width = kWidest * std::min(1.0, std::abs(link.weight));
    drawing.band({kLeft, middle(link.reader)}, {kRight, middle(link.read)}, std::max(0.25, width),
                 link.weight < 0 ? "band f1" : "band f0");
  }
  for (std::size_t token = first; token < count; ++token) {
    const std::string sign = token_sign(map.tokens[token]);
    drawing.text({kLeft - 6, middle(token) + 4}, sign, Anchor::end, "letter");
    drawing.text({kRight + 6, middle(token) + 4}, sign, Anchor::start, "letter");
  }
  std::string note = map.note;
  const auto say = [&](const std::string& sentence) {
    if (!sentence.empty()) note += (note.empty() ? "" : " ") + sentence;
  };
  if (negative) say("Bands of the second colour have weights below 0.");
  if (first > 0)
    say("The last " + std::to_string(count - first) + " of " + std::to_string(count) + " tokens; " +
        std::to_string(before) + (before == 1 ? " link of theirs goes" : " links of theirs go") +
        " to tokens before.");
  say(left_out_text(left_out));
  const double end = drawing.paragraph(top + kRow * double(count - first) + 4, note, "note");
  return drawing.finish(map.name, map.title, end + kMargin);
}

}  // namespace heed_report
