// SPDX-License-Identifier: Apache-2.0
#pragma once

// Words that people type: lists, and names that nearly match a known one.

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace heed_program {

// The items of a list that commas separate; one empty item for an empty text.
[[nodiscard]] inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> items(1);
  for (const char c : text) {
    if (c == ',')
      items.emplace_back();
    else
      items.back() += c;
  }
  return items;
}

// The items with ", " between.
[[nodiscard]] inline std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return text;
}

// Number of characters that must be added, left out, replaced, or swapped with the next one, to turn `a` into `b`.
[[nodiscard]] inline std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1,
                              edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  return edits[a.size()][b.size()];
}

// "; did you mean mqar?", the end of a sentence about an unknown word. It suggests the first of the
// known names that need the fewest edits, if these are at most a third of the word's characters.
// Upper case counts as lower case, and a name behind a colon, as that of zoo:sink, may stand alone.
[[nodiscard]] inline std::string did_you_mean(std::string word,
                                              const std::vector<std::string>& known) {
  constexpr std::size_t longest = 80;
  if (word.empty() || word.size() > longest) return "";
  for (char& c : word) c = char(std::tolower(static_cast<unsigned char>(c)));
  std::size_t fewest = std::max<std::size_t>(1, word.size() / 3) + 1;
  std::string nearest;
  for (const std::string& name : known)
    for (const std::size_t from : {std::size_t(0), name.find(':') + 1})
      if (const std::size_t edits = edits_between(word, name.substr(from)); edits < fewest) {
        fewest = edits;
        nearest = name;
      }
  return nearest.empty() ? "" : "; did you mean " + nearest + "?";
}

}  // namespace heed_program
