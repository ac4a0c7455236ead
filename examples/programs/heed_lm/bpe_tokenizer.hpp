// SPDX-License-Identifier: Apache-2.0
#pragma once

// GPT-2's byte-pair encoding: a text is split into pieces, each piece is taken byte by byte and its
// bytes are merged. Any bytes can be encoded.
//
// Files   vocab.json, an object from tokens to ids, and merges.txt, one pair of tokens per line
//         after an optional first line that begins with #version. Tokens are spelled in printable
//         characters, one for each byte. A token that is neither a byte nor made by a merge is a special token: any
//         number of them in angle or square brackets, at most 64 others.
// Errors  std::runtime_error when a file cannot be read, std::invalid_argument for wrong contents.

#include "bpe_merges.hpp"
#include "bpe_split.hpp"
#include "tokenizer.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace heed_lm {

// A pair of tokens that become one, spelled in printable characters.
struct BpeMerge {
  std::string left, right;
  Index line;  // line of merges.txt, for messages
};

// The sources of tokens and merges, for messages.
struct BpeNames {
  std::string tokens, merges;
};
inline const BpeNames kTokenizerState = {"tokenizer state, tokens", "tokenizer state, merges"};

// The merges of the lines of merges.txt. A first line that begins with #version is left out, and so are empty lines.
[[nodiscard]] std::vector<BpeMerge> merges_from_lines(const std::vector<std::string>& lines,
                                                      const BpeNames& names);

class BpeTokenizer final : public Tokenizer {
 public:
  // `tokens` by id, in printable spelling. Each byte and each merged pair must be a token.
  BpeTokenizer(const std::vector<std::string>& tokens, const std::vector<BpeMerge>& merges,
               const BpeNames& names);

  [[nodiscard]] std::string name() const override { return "gpt2"; }
  [[nodiscard]] std::string state() const override;
  [[nodiscard]] std::vector<Index> special_tokens() const override { return special_; }

 private:
  struct Hash {
    using is_transparent = void;
    [[nodiscard]] std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  using Ids = std::unordered_map<std::string, std::vector<Index>, Hash, std::equal_to<>>;

  void encode_text(std::string_view text, std::vector<Index>& ids) const override;
  [[nodiscard]] std::vector<Index> merged(std::string_view piece) const;

  std::vector<Index> byte_ids_, special_;  // (256), and ids that are neither a byte nor merged
  BpeMerges merges_;
  BpeSplit split_;
  mutable Ids known_;  // pieces that have been encoded before
};

[[nodiscard]] std::unique_ptr<BpeTokenizer> read_bpe_tokenizer(const std::string& vocab_path,
                                                               const std::string& merges_path);

}  // namespace heed_lm
