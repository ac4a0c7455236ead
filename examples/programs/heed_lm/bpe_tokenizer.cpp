// SPDX-License-Identifier: Apache-2.0
#include "bpe_tokenizer.hpp"

#include "text_file.hpp"
#include "text_utf8.hpp"

#include <heed/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_set>

namespace heed_lm {

namespace {

using Json = nlohmann::json;

constexpr const char* kEndOfText = "<|endoftext|>";

// Only pieces of up to kLongestKnown bytes are remembered, at most kMostKnown of them: words recur,
// longer pieces seldom do.
constexpr std::size_t kLongestKnown = 32, kMostKnown = std::size_t{1} << 17;

// Most tokens without brackets that no merge makes: up to this many may be special tokens.
constexpr std::size_t kMostNameless = 64;

// The token in quotes for a message, cut after 40 bytes.
[[nodiscard]] std::string in_quotes(const std::string& token) {
  std::size_t longest = 40;
  if (token.size() <= longest) return '"' + token + '"';
  while (longest > 0 && (static_cast<unsigned char>(token[longest]) & 0xC0U) == 0x80U) --longest;
  return '"' + token.substr(0, longest) + "...\"";
}

// The character that spells each byte: printable bytes of Latin-1 spell themselves, the others are spelled U+0100 and up,
// in order.
[[nodiscard]] std::array<char32_t, 256> make_spelling() {
  std::array<char32_t, 256> spelling{};
  char32_t other = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    spelling[byte] = printable ? byte : other++;
  }
  return spelling;
}

[[nodiscard]] const std::array<char32_t, 256>& spelling() {
  static const std::array<char32_t, 256> table = make_spelling();
  return table;
}

[[nodiscard]] std::string spelled(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) append_utf8(spelling()[static_cast<unsigned char>(byte)], text);
  return text;
}

[[nodiscard]] std::map<char32_t, char> make_meaning() {
  std::map<char32_t, char> meaning;
  for (std::size_t byte = 0; byte < 256; ++byte) meaning[spelling()[byte]] = char(byte);
  return meaning;
}

// The bytes of a spelled token, or nothing if it has a character that stands for no byte.
[[nodiscard]] std::optional<std::string> bytes_of(const std::string& token) {
  static const std::map<char32_t, char> meaning = make_meaning();
  std::string bytes;
  for (std::size_t at = 0; at < token.size();) {
    const Utf8Step step = utf8_step(token, at);
    const auto found = meaning.find(step.code);
    if (step.kind != Utf8::character || found == meaning.end()) return std::nullopt;
    bytes += found->second;
    at += step.bytes;
  }
  return bytes;
}

[[nodiscard]] std::vector<std::string> all_bytes_of(const std::vector<std::string>& tokens,
                                                    const BpeNames& names) {
  std::vector<std::string> bytes;
  for (const std::string& token : tokens) {
    const std::optional<std::string> found = bytes_of(token);
    heed::require(found && !found->empty(), names.tokens, ": the token ", in_quotes(token),
                  " with id ", bytes.size(),
                  token.empty() ? " is empty" : " has a character that stands for no byte");
    bytes.push_back(*found);
  }
  return bytes;
}

[[nodiscard]] std::optional<Index> find_end_of_text(const std::vector<std::string>& tokens) {
  for (std::size_t id = 0; id < tokens.size(); ++id)
    if (tokens[id] == kEndOfText) return Index(id);
  return std::nullopt;
}

// The names in an object's first level must differ: the parser itself would keep the last of two values.
[[nodiscard]] Json parse_json(const std::string& text, const std::string& name) {
  std::unordered_set<std::string> keys;
  const auto require_new = [&](int depth, Json::parse_event_t event, const Json& key) {
    if (event == Json::parse_event_t::key && depth == 1)
      heed::require(keys.insert(key.get<std::string>()).second, name, ": the token ",
                    in_quotes(key.get<std::string>()), " stands there twice");
    return true;
  };
  try {
    return Json::parse(text, require_new);
  } catch (const Json::parse_error& error) {
    heed::fail(name, ": not JSON from byte ", error.byte, " of ", text.size(), " on");
  } catch (const Json::exception& error) {
    heed::fail(name, ": ", error.what());  // a number too large for any type
  }
}

// The tokens of vocab.json by id.
[[nodiscard]] std::vector<std::string> tokens_from_json(const std::string& text,
                                                        const std::string& name) {
  const Json json = parse_json(text, name);
  heed::require(json.is_object() && !json.empty(), name,
                ": the file must hold a JSON object from tokens to ids");
  std::vector<std::string> tokens(json.size());
  std::vector<bool> taken(json.size());
  for (const auto& [token, value] : json.items()) {
    heed::require(value.is_number_integer(), name, ": the token ", in_quotes(token), " has a ",
                  value.type_name(), " as its id, it must be a whole number");
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() < json.size();
    heed::require(fits, name, ": the ids of ", json.size(), " tokens must be 0 to ",
                  json.size() - 1, " without a gap, but ", in_quotes(token), " has ", value.dump());
    const auto id = value.get<std::size_t>();
    heed::require(!taken[id], name, ": the tokens ", in_quotes(tokens[id]), " and ",
                  in_quotes(token), " have the same id ", id);
    taken[id] = true;
    tokens[id] = token;
  }
  return tokens;
}

// True for <|endoftext|>, <pad>, [MASK] and the like.
[[nodiscard]] bool in_brackets(const std::string& token) {
  return token.size() > 2 && ((token.starts_with('<') && token.ends_with('>')) ||
                              (token.starts_with('[') && token.ends_with(']')));
}

// Throws if so many tokens are made by no merge that the merges must belong to another vocabulary, or are incomplete.
void require_merges(const BpeTokenizer& tokenizer, const std::vector<std::string>& tokens,
                    const BpeNames& names) {
  std::vector<std::string> nameless;
  for (const Index id : tokenizer.special_tokens())
    if (const std::string& token = tokens[std::size_t(id)]; !in_brackets(token))
      nameless.push_back(token);
  heed::require(nameless.size() <= kMostNameless, names.merges, ": no line makes ", nameless.size(),
                " of the ", tokens.size(), " tokens of ", names.tokens, ", the first of them ",
                nameless.empty() ? "" : in_quotes(nameless.front()),
                "; the file is cut off or belongs to another vocabulary");
}

[[nodiscard]] std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  constexpr std::string_view mark = "\xEF\xBB\xBF";  // some editors put this before UTF-8
  for (std::size_t at = text.starts_with(mark) ? mark.size() : 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    if (lines.back().ends_with('\r')) lines.back().pop_back();
    at = end + 1;
  }
  return lines;
}

}  // namespace

std::vector<BpeMerge> merges_from_lines(const std::vector<std::string>& lines,
                                        const BpeNames& names) {
  std::vector<BpeMerge> merges;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (line.empty() || (i == 0 && line.starts_with("#version"))) continue;
    const std::size_t space = line.find(' ');
    const bool pair = space != std::string::npos && space > 0 && space + 1 < line.size() &&
                      line.find(' ', space + 1) == std::string::npos;
    heed::require(pair, names.merges, " line ", i + 1, ": ", in_quotes(line),
                  " must be two tokens with one space between");
    merges.push_back({line.substr(0, space), line.substr(space + 1), Index(i + 1)});
  }
  return merges;
}

BpeTokenizer::BpeTokenizer(const std::vector<std::string>& tokens,
                           const std::vector<BpeMerge>& merges, const BpeNames& names)
    : Tokenizer(all_bytes_of(tokens, names), find_end_of_text(tokens)) {
  std::unordered_map<std::string, Index> ids;
  for (const std::string& token : tokens)
    heed::require(ids.emplace(token, Index(ids.size())).second, names.tokens, ": the token ",
                  in_quotes(token), " stands there twice, again with id ", ids.size());
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids.find(spelled(std::string(1, char(byte))));
    heed::require(found != ids.end(), names.tokens, ": no token for byte ", byte, " among ",
                  tokens.size());
    byte_ids_.push_back(found->second);
  }
  for (const BpeMerge& merge : merges) {
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      heed::require(found != ids.end(), names.merges, " line ", merge.line, ": ", in_quotes(token),
                    " is not in the vocabulary of ", ids.size(), " tokens");
      return found->second;
    };
    const bool added =
        merges_.add({id_of(merge.left), id_of(merge.right), id_of(merge.left + merge.right)});
    heed::require(added, names.merges, " line ", merge.line, ": the pair ", in_quotes(merge.left),
                  " and ", in_quotes(merge.right), " has been merged by an earlier line");
  }
  std::vector<bool> made(tokens.size());
  for (const Index id : byte_ids_) made[std::size_t(id)] = true;
  for (const BpeMerges::Rule& rule : merges_.rules()) made[std::size_t(rule.merged)] = true;
  for (std::size_t id = 0; id < made.size(); ++id)
    if (!made[id]) special_.push_back(Index(id));
}

std::string BpeTokenizer::state() const {
  Json tokens = Json::array(), merges = Json::array();
  for (Index id = 0; id < vocab_size(); ++id) tokens.push_back(spelled(token(id)));
  for (const BpeMerges::Rule& rule : merges_.rules())
    merges.push_back(spelled(token(rule.left)) + ' ' + spelled(token(rule.right)));
  return Json{{"tokenizer", name()}, {"tokens", tokens}, {"merges", merges}}.dump();
}

void BpeTokenizer::encode_text(std::string_view text, std::vector<Index>& ids) const {
  for (const std::string_view piece : split_.pieces(text)) {
    if (const auto known = known_.find(piece); known != known_.end()) {
      ids.insert(ids.end(), known->second.begin(), known->second.end());
      continue;
    }
    std::vector<Index> piece_ids = merged(piece);
    ids.insert(ids.end(), piece_ids.begin(), piece_ids.end());
    if (piece.size() <= kLongestKnown && known_.size() < kMostKnown)
      known_.emplace(piece, std::move(piece_ids));
  }
}

std::vector<Index> BpeTokenizer::merged(std::string_view piece) const {
  std::vector<Index> ids;
  for (const char byte : piece) ids.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
  merges_.apply(ids);
  return ids;
}

std::unique_ptr<BpeTokenizer> read_bpe_tokenizer(const std::string& vocab_path,
                                                 const std::string& merges_path) {
  const BpeNames names{vocab_path, merges_path};
  const std::vector<std::string> tokens = tokens_from_json(read_text_file(vocab_path), vocab_path);
  const std::vector<std::string> lines = lines_of(read_text_file(merges_path));
  auto tokenizer = std::make_unique<BpeTokenizer>(tokens, merges_from_lines(lines, names), names);
  require_merges(*tokenizer, tokens, names);
  return tokenizer;
}

}  // namespace heed_lm
