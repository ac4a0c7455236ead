// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.hpp"

#include "bpe_tokenizer.hpp"
#include "text_utf8.hpp"

#include <heed/core/error.hpp>

#include <nlohmann/json.hpp>

#include <charconv>
#include <cstddef>
#include <set>

namespace heed_lm {

namespace {

constexpr char32_t kReplacement = 0xFFFD;

// Calls take(character, at) for each character of a text.
template <class Take>
void for_each_character(std::string_view text, const Take& take) {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    heed::require(step.kind == Utf8::character, "byte ", at, " of ", text.size(),
                  " is not UTF-8, it has the value ", int(static_cast<unsigned char>(text[at])));
    take(step.code, at);
    at += step.bytes;
  }
}

[[nodiscard]] std::vector<std::string> all_bytes() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, char(byte));
  return tokens;
}

[[nodiscard]] std::vector<std::string> all_characters(const std::string& alphabet) {
  std::vector<std::string> tokens;
  for_each_character(alphabet,
                     [&](char32_t code, std::size_t) { append_utf8(code, tokens.emplace_back()); });
  return tokens;
}

[[nodiscard]] std::vector<std::string> all_numbers(Index count) {
  heed::require(count >= 1 && count <= NumberTokenizer::kMost, "the tokenizer has ", count,
                " numbers, it must have 1 to ", NumberTokenizer::kMost);
  std::vector<std::string> tokens;
  for (Index n = 0; n < count; ++n) tokens.push_back(std::to_string(n) + " ");
  return tokens;
}

}  // namespace

const std::string& Tokenizer::token(Index id) const {
  heed::require(id >= 0 && id < vocab_size(), "Tokenizer::token: id ", id,
                " is not in the vocabulary of ", vocab_size(), " tokens");
  return tokens_[std::size_t(id)];
}

std::vector<Index> Tokenizer::encode(std::string_view text, EndOfText end) const {
  std::vector<Index> ids;
  if (end == EndOfText::as_token && end_of_text_) {
    const std::string& mark = token(*end_of_text_);
    for (std::size_t at; (at = text.find(mark)) != std::string_view::npos;) {
      encode_text(text.substr(0, at), ids);
      ids.push_back(*end_of_text_);
      text.remove_prefix(at + mark.size());
    }
  }
  encode_text(text, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const Index> ids) const {
  std::string text;
  for (const Index id : ids) text += token(id);
  return text;
}

ByteTokenizer::ByteTokenizer() : Tokenizer(all_bytes(), std::nullopt) {}

std::string ByteTokenizer::state() const { return nlohmann::json{{"tokenizer", name()}}.dump(); }

void ByteTokenizer::encode_text(std::string_view text, std::vector<Index>& ids) const {
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
}

CharacterTokenizer::CharacterTokenizer(const std::string& alphabet)
    : Tokenizer(all_characters(alphabet), std::nullopt), alphabet_(alphabet) {
  for_each_character(alphabet, [&](char32_t code, std::size_t at) {
    const bool added = ids_.emplace(code, Index(ids_.size())).second;
    heed::require(added, "the alphabet has ", character_name(code), " twice, again at byte ", at);
  });
}

std::string CharacterTokenizer::state() const {
  return nlohmann::json{{"tokenizer", name()}, {"alphabet", alphabet_}}.dump();
}

void CharacterTokenizer::encode_text(std::string_view text, std::vector<Index>& ids) const {
  for_each_character(text, [&](char32_t code, std::size_t at) {
    const auto found = ids_.find(code);
    heed::require(found != ids_.end(), "the character ", character_name(code), " at byte ", at,
                  " is not in the alphabet of ", vocab_size(), " characters");
    ids.push_back(found->second);
  });
}

NumberTokenizer::NumberTokenizer(Index count) : Tokenizer(all_numbers(count), std::nullopt) {}

std::string NumberTokenizer::state() const {
  return nlohmann::json{{"tokenizer", name()}, {"count", vocab_size()}}.dump();
}

void NumberTokenizer::encode_text(std::string_view text, std::vector<Index>& ids) const {
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view word = text.substr(at, text.find(' ', at) - at);
    Index number = -1;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    heed::require(error == std::errc() && stop == word.data() + word.size() && number >= 0 &&
                      number < vocab_size(),
                  "\"", std::string(word.substr(0, 80)), "\" at byte ", at,
                  " is none of the numbers from 0 to ", vocab_size() - 1, " that are tokens");
    ids.push_back(number);
    at += word.size() + 1;
  }
}

std::string alphabet_of(std::string_view text) {
  std::set<char32_t> codes;
  for_each_character(text, [&](char32_t code, std::size_t) { codes.insert(code); });
  std::string alphabet;
  for (const char32_t code : codes) append_utf8(code, alphabet);
  return alphabet;
}

std::unique_ptr<Tokenizer> tokenizer_from(const std::string& state) {
  try {
    const nlohmann::json json = nlohmann::json::parse(state);
    const std::string name = json.at("tokenizer").get<std::string>();
    if (name == "bytes") return std::make_unique<ByteTokenizer>();
    if (name == "characters")
      return std::make_unique<CharacterTokenizer>(json.at("alphabet").get<std::string>());
    if (name == "numbers") return std::make_unique<NumberTokenizer>(json.at("count").get<Index>());
    if (name == "gpt2")
      return std::make_unique<BpeTokenizer>(
          json.at("tokens").get<std::vector<std::string>>(),
          merges_from_lines(json.at("merges").get<std::vector<std::string>>(), kTokenizerState),
          kTokenizerState);
    heed::fail("the tokenizer is \"", name.size() > 80 ? name.substr(0, 80) + "..." : name,
               "\", it must be bytes, characters, numbers or gpt2");
  } catch (const nlohmann::json::exception& error) {
    const std::string words = error.what();  // may quote the whole state
    heed::fail("the tokenizer is damaged: ",
               words.size() > 200 ? words.substr(0, 200) + "..." : words);
  }
}

std::string StreamDecoder::push(Index id) {
  pending_ += tokenizer_.token(id);
  std::string text;
  std::size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = utf8_step(pending_, at);
    if (step.kind == Utf8::cut) break;
    append_utf8(step.kind == Utf8::character ? step.code : kReplacement, text);
    at += step.bytes;
  }
  pending_.erase(0, at);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  if (!pending_.empty()) append_utf8(kReplacement, text);
  pending_.clear();
  return text;
}

}  // namespace heed_lm
