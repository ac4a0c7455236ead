// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokenizers turn text into numbers and back: by bytes, by characters and as numbers here, by GPT-2's byte pairs in
// bpe_tokenizer.hpp.

#include <heed/core/config.hpp>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace heed_lm {

using heed::Index;

// The reading of the end-of-text token's name when it stands in a text that encode() gets.
enum class EndOfText { as_text, as_token };

// Errors: std::invalid_argument. Not for concurrent use: a tokenizer may remember what it encoded.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  [[nodiscard]] virtual std::string name() const = 0;
  // JSON from which tokenizer_from() makes the same tokenizer.
  [[nodiscard]] virtual std::string state() const = 0;

  [[nodiscard]] Index vocab_size() const { return Index(tokens_.size()); }
  [[nodiscard]] std::optional<Index> end_of_text() const { return end_of_text_; }
  // Ids into which no text is encoded, except as the end of text; in order.
  [[nodiscard]] virtual std::vector<Index> special_tokens() const { return {}; }
  // The bytes of one token; not always whole characters.
  [[nodiscard]] const std::string& token(Index id) const;

  [[nodiscard]] std::vector<Index> encode(std::string_view text,
                                          EndOfText end = EndOfText::as_text) const;
  // decode(encode(text)) is the text, byte for byte.
  [[nodiscard]] std::string decode(std::span<const Index> ids) const;

 protected:
  Tokenizer(std::vector<std::string> tokens, std::optional<Index> end_of_text)
      : tokens_(std::move(tokens)), end_of_text_(end_of_text) {}

 private:
  // Appends the ids of a text without end-of-text tokens.
  virtual void encode_text(std::string_view text, std::vector<Index>& ids) const = 0;

  std::vector<std::string> tokens_;  // by id
  std::optional<Index> end_of_text_;
};

// Each byte is its own id: 256 ids for any text.
class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer();
  [[nodiscard]] std::string name() const override { return "bytes"; }
  [[nodiscard]] std::string state() const override;

 private:
  void encode_text(std::string_view text, std::vector<Index>& ids) const override;
};

// One id per character (code point) of an alphabet. A character outside the alphabet, or a byte
// that is not UTF-8, is an error that names its position.
class CharacterTokenizer final : public Tokenizer {
 public:
  // The alphabet in the order of ids; a character that stands there twice is an error.
  explicit CharacterTokenizer(const std::string& alphabet);
  [[nodiscard]] std::string name() const override { return "characters"; }
  [[nodiscard]] std::string state() const override;

 private:
  void encode_text(std::string_view text, std::vector<Index>& ids) const override;

  std::string alphabet_;
  std::map<char32_t, Index> ids_;
};

// Text that consists of numbers, from a generated task: "17 4 0 ". Each token ends with a blank; in
// a text to encode the last blank is optional.
class NumberTokenizer final : public Tokenizer {
 public:
  static constexpr Index kMost = Index(1) << 20;

  // Numbers from 0 to count - 1; count from 1 to kMost.
  explicit NumberTokenizer(Index count);
  [[nodiscard]] std::string name() const override { return "numbers"; }
  [[nodiscard]] std::string state() const override;

 private:
  void encode_text(std::string_view text, std::vector<Index>& ids) const override;
};

// The distinct characters of a text, sorted by code point.
[[nodiscard]] std::string alphabet_of(std::string_view text);

// Makes the tokenizer from the text that its state() returned.
[[nodiscard]] std::unique_ptr<Tokenizer> tokenizer_from(const std::string& state);

// Decodes tokens one at a time into complete characters. Valid text is unchanged. Bytes that can never become a
// character are replaced by U+FFFD, one for each longest valid beginning.
class StreamDecoder {
 public:
  // The tokenizer must outlive the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The characters that this token completes; often none or several.
  [[nodiscard]] std::string push(Index id);
  // Ends the text: U+FFFD if the last character remained incomplete, else nothing.
  [[nodiscard]] std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;  // the beginning of a character
};

}  // namespace heed_lm
