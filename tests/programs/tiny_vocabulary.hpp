// SPDX-License-Identifier: Apache-2.0
#pragma once

// A vocabulary of GPT-2's kind that is small: 256 bytes, a few merges and an end of text.

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace heed_test {

using Lines = std::vector<std::string>;

// GPT-2's spelling, a second time: 33 to 126, 161 to 172, 174 to 255 are themselves, the others 256 and up.
[[nodiscard]] inline std::string spelled_byte(int byte) {
  const auto itself = [](int b) {
    return (b > 32 && b < 127) || (b > 160 && b < 173) || (b > 173 && b < 256);
  };
  int code = byte, before = 0;
  for (int b = 0; b < byte; ++b) before += !itself(b);
  if (!itself(byte)) code = 256 + before;
  if (code < 128) return {char(code)};
  return {char(0xC0 | code >> 6), char(0x80 | (code & 0x3F))};
}

// The tokens are 256 bytes as ids 0 to 255, then the results of these merges, then an end of text.
inline const Lines kMerges = {"h e", "l l", "he ll", "o w", "hell o", "Ġ w", "Ġw o", "a a"};

[[nodiscard]] inline Lines tiny_tokens() {
  Lines tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(spelled_byte(byte));
  for (std::string merge : kMerges) {
    merge.erase(merge.find(' '), 1);
    tokens.push_back(merge);
  }
  tokens.push_back("<|endoftext|>");
  return tokens;
}

// The texts of vocab.json and merges.txt.
[[nodiscard]] inline std::string vocab_json(const Lines& tokens) {
  nlohmann::json ids = nlohmann::json::object();
  for (const std::string& token : tokens) ids[token] = ids.size();
  return ids.dump();
}
[[nodiscard]] inline std::string joined(const Lines& lines, const std::string& end = "\n") {
  std::string text;
  for (const std::string& line : lines) text += line + end;
  return text;
}

}  // namespace heed_test
