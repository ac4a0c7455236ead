// SPDX-License-Identifier: Apache-2.0
#include "catch.hpp"
#include "heed_lm/bpe_tokenizer.hpp"
#include "heed_lm/instructions.hpp"
#include "heed_lm/text_data.hpp"
#include "heed_lm/text_file.hpp"
#include "heed_lm/text_random.hpp"
#include "heed_lm/text_utf8.hpp"
#include "heed_lm/tokenizer.hpp"
#include "programs/tiny_vocabulary.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace heed_lm;
using namespace heed_test;

namespace {

using Ids = std::vector<Index>;

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// A file that lives as long as the object.
class ScratchFile {
 public:
  ScratchFile(const std::string& name, const std::string& content)
      : path_(std::filesystem::temp_directory_path() /
              ("heed_lm_" + std::to_string(::getpid()) + "_" + name)) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~ScratchFile() { std::filesystem::remove(path_); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string utf8(char32_t code) {
  std::string text;
  append_utf8(code, text);
  return text;
}

// Ids of tiny_tokens().
constexpr Index kHello = 260, kSpaceWo = 262, kDoubleA = 263, kEnd = 264;

const BpeNames kNames = {"vocab.json", "merges.txt"};

BpeTokenizer tokenizer_of(const Lines& tokens, const Lines& merges) {
  return {tokens, merges_from_lines(merges, kNames), kNames};
}

BpeTokenizer tiny_bpe() { return tokenizer_of(tiny_tokens(), kMerges); }

std::string random_bytes(std::uint64_t number, std::size_t longest) {
  Draws draws(7, Purpose::windows, number);
  std::string bytes(std::size_t(draws.below(Index(longest) + 1)), '\0');
  // Small alphabets make merges and characters that random bytes hardly ever have.
  const std::string_view likely = "helo w'sa1 \n\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
  for (char& byte : bytes)
    byte = draws.chance(0.8) ? likely[std::size_t(draws.below(Index(likely.size())))]
                             : char(draws.below(256));
  return bytes;
}

// Merges by the words of the definition: the earliest rule, all its pairs from left to right, again.
Ids merged_slowly(Ids ids, const std::vector<BpeMerges::Rule>& rules) {
  for (std::size_t r = 0; r < rules.size();) {
    Ids next;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool pair =
          i + 1 < ids.size() && ids[i] == rules[r].left && ids[i + 1] == rules[r].right;
      next.push_back(pair ? rules[r].merged : ids[i]);
      i += pair;
    }
    r = next.size() < ids.size() ? 0 : r + 1;
    ids = next;
  }
  return ids;
}

Lines split(std::string_view text) {
  Lines pieces;
  for (const std::string_view piece : BpeSplit().pieces(text)) pieces.emplace_back(piece);
  return pieces;
}

Ids counting(Index count) {
  Ids ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), Index{0});
  return ids;
}

Ids row_of(const Ids& matrix, const Batch& batch, Index row) {
  return {matrix.begin() + row * batch.len, matrix.begin() + (row + 1) * batch.len};
}

bool same(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.len == b.len && a.inputs == b.inputs && a.targets == b.targets;
}

}  // namespace

TEST_CASE("every code point goes to UTF-8 and back, and surrogates do not") {
  for (char32_t code = 0; code < 0x110000; ++code) {
    const Utf8Step step = utf8_step(utf8(code), 0);
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    if ((step.kind == Utf8::character) == surrogate || (!surrogate && step.code != code))
      FAIL("code point " << std::uint32_t(code));
  }
  CHECK(utf8(0x20AC) == "\xE2\x82\xAC");
  CHECK(utf8(0x1F600) == "\xF0\x9F\x98\x80");
}

TEST_CASE("what is not UTF-8 is told from what is cut") {
  const auto kind = [](std::string_view text) { return utf8_step(text, 0).kind; };
  for (const std::string_view text :
       {"\x80", "\xBF", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC3(", "\xE2\x82("})
    CHECK(kind(text) == Utf8::invalid);
  for (const std::string_view text : {"\xC3", "\xE2", "\xE2\x82", "\xF0\x9F\x98"})
    CHECK(kind(text) == Utf8::cut);
  CHECK(utf8_step("\xF0\x9F\x98(", 0).bytes == 3);
  CHECK(utf8_step("\xE0\x80", 0).bytes == 1);
}

TEST_CASE("bytes are their own ids") {
  const ByteTokenizer bytes;
  CHECK(bytes.vocab_size() == 256);
  CHECK(bytes.encode("A\xFF") == Ids{65, 255});
  CHECK(bytes.encode("").empty());
  CHECK(bytes.decode(Ids{0, 128, 65}) == std::string("\0\x80"
                                                     "A",
                                                     3));
  CHECK_FALSE(bytes.end_of_text().has_value());
  CHECK(message_of([&] { (void)bytes.decode(Ids{256}); }) ==
        "Tokenizer::token: id 256 is not in the vocabulary of 256 tokens");
  CHECK(message_of([&] { (void)bytes.decode(Ids{-1}); }) ==
        "Tokenizer::token: id -1 is not in the vocabulary of 256 tokens");
}

TEST_CASE("characters have the ids of their place among the sorted characters of a text") {
  CHECK(alphabet_of("banané\nñ") == "\nabnéñ");
  const CharacterTokenizer characters(alphabet_of("banané\nñ"));
  CHECK(characters.vocab_size() == 6);
  CHECK(characters.encode("banñé\n") == Ids{2, 1, 3, 5, 4, 0});
  CHECK(characters.decode(Ids{4, 2}) == "éb");
}

TEST_CASE("a character that is not in the alphabet is named with its place") {
  const CharacterTokenizer characters("abc");
  CHECK(message_of([&] { (void)characters.encode("abéc"); }) ==
        "the character U+00E9 'é' at byte 2 is not in the alphabet of 3 characters");
  CHECK(message_of([&] { (void)characters.encode("a\n"); }) ==
        "the character U+000A at byte 1 is not in the alphabet of 3 characters");
  CHECK(message_of([&] { (void)characters.encode("ab\xC3"); }) ==
        "byte 2 of 3 is not UTF-8, it has the value 195");
  CHECK(message_of([&] { (void)alphabet_of("a\xFF"); }) ==
        "byte 1 of 2 is not UTF-8, it has the value 255");
  CHECK(message_of([&] { (void)CharacterTokenizer("aba"); }) ==
        "the alphabet has U+0061 'a' twice, again at byte 2");
}

TEST_CASE("a text is split as GPT-2 splits it") {
  CHECK(split("Hello world's  end, 42nd.") ==
        Lines{"Hello", " world", "'s", " ", " end", ",", " 42", "nd", "."});
  CHECK(split("we'll've 'tis I'D") == Lines{"we", "'ll", "'ve", " '", "tis", " I", "'", "D"});
  CHECK(split("a  \n b   ") == Lines{"a", "  \n", " b", "   "});
  CHECK(split("été 日本 Ⅷ½ !?") == Lines{"été", " 日本", " Ⅷ½", " !?"});
  CHECK(split("x\n\ny") == Lines{"x", "\n", "\n", "y"});
  // No-break space is white space; the Mongolian vowel separator is none.
  CHECK(split("a\u00A0\u00A0b") == Lines{"a", "\u00A0", "\u00A0", "b"});
  CHECK(split("\u180E\u180E ") == Lines{"\u180E\u180E", " "});
  CHECK(split("a\u0085\u2003\tb") == Lines{"a", "\u0085\u2003", "\t", "b"});
  CHECK(split("").empty());
}

TEST_CASE("bytes that are not UTF-8 are pieces of their own") {
  CHECK(split("ab\xFF\xC3 cd\xE2\x82") == Lines{"ab", "\xFF\xC3", " cd", "\xE2\x82"});
}

TEST_CASE("merges apply by rank and from left to right") {
  const BpeTokenizer bpe = tiny_bpe();
  CHECK(bpe.vocab_size() == 265);
  CHECK(bpe.encode("hello") == Ids{kHello});
  CHECK(bpe.encode("hello world") == Ids{kHello, kSpaceWo, 'r', 'l', 'd'});
  CHECK(bpe.encode("aaaaa") == Ids{kDoubleA, kDoubleA, 'a'});
  // "ow" comes before "hello": it takes the o away.
  CHECK(bpe.encode("hellow") == Ids{258, 259});
  CHECK(bpe.decode(bpe.encode("hello world")) == "hello world");
  CHECK(bpe.encode("").empty());
}

TEST_CASE("all pairs of a rule are merged before pairs that this has made") {
  BpeMerges merges;
  CHECK(merges.add({2, 0, 3}));  // (ab) a
  CHECK(merges.add({0, 1, 2}));  // a b
  CHECK_FALSE(merges.add({0, 1, 4}));
  Ids ids = {0, 1, 0, 1, 0};
  merges.apply(ids);
  CHECK(ids == Ids{2, 3});
}

TEST_CASE("the heap merges like the definition") {
  for (std::uint64_t number = 0; number < 300; ++number) {
    // Each rule joins two earlier symbols, in an order of ranks that no training would make.
    BpeMerges merges;
    Draws draws(11, Purpose::windows, number);
    std::vector<BpeMerges::Rule> rules;
    for (Index merged = 2; merged < 14; ++merged)
      rules.push_back({draws.below(merged), draws.below(merged), merged});
    for (const Index i : example_order(Index(rules.size()), 3, number))
      (void)merges.add(rules[std::size_t(i)]);
    for (int text = 0; text < 10; ++text) {
      Ids ids(std::size_t(draws.below(40)));
      for (Index& id : ids) id = draws.below(2);
      const Ids slow = merged_slowly(ids, merges.rules());
      merges.apply(ids);
      CHECK(ids == slow);
    }
  }
}

TEST_CASE("any bytes come back from GPT-2's encoding") {
  const BpeTokenizer bpe = tiny_bpe();
  const ByteTokenizer bytes;
  for (std::uint64_t number = 0; number < 3000; ++number) {
    const std::string text = random_bytes(number, 60);
    if (bpe.decode(bpe.encode(text)) != text) FAIL("text " << number);
    if (bytes.decode(bytes.encode(text)) != text) FAIL("text " << number);
  }
}

TEST_CASE("remembered pieces have the ids that they had at first") {
  const BpeTokenizer bpe = tiny_bpe();
  const std::string text = "hello hello aaaaa hello, hellow aaaaa";
  const Ids first = bpe.encode(text);
  CHECK(bpe.encode(text) == first);
  CHECK(tiny_bpe().encode(text) == first);
}

TEST_CASE("long pieces take no quadratic time") {
  const BpeTokenizer bpe = tiny_bpe();
  const std::string text = std::string(200001, 'a') + std::string(200000, ' ') + "!";
  const Ids ids = bpe.encode(text);
  CHECK(ids.size() == 100001 + 200000 + 1);
  CHECK(bpe.decode(ids) == text);
}

TEST_CASE("the end of text is a token only when asked for") {
  const BpeTokenizer bpe = tiny_bpe();
  const std::string text = "<|endoftext|>aa<|endoftext|>";
  REQUIRE(bpe.end_of_text() == kEnd);
  CHECK(bpe.encode(text, EndOfText::as_token) == Ids{kEnd, kDoubleA, kEnd});
  const Ids plain = bpe.encode(text);
  CHECK(std::count(plain.begin(), plain.end(), kEnd) == 0);
  CHECK(bpe.decode(plain) == text);
  CHECK(ByteTokenizer().encode(text, EndOfText::as_token).size() == text.size());

  Lines tokens = tiny_tokens();
  tokens.pop_back();
  CHECK_FALSE(tokenizer_of(tokens, kMerges).end_of_text().has_value());

  const std::vector<Instruction> marked = {{"Q", "", "aa<|endoftext|>aa"}};
  const auto ends = [&](EndOfText marks) {
    const Batch batch = InstructionData(marked, bpe, 100, marks).batch(Ids{0});
    return std::count(batch.targets.begin(), batch.targets.end(), kEnd);
  };
  CHECK(ends(EndOfText::as_text) == 1);
  CHECK(ends(EndOfText::as_token) == 2);
}

TEST_CASE("a vocabulary is read from its two files, with any line ends") {
  const ScratchFile vocab("vocab.json", vocab_json(tiny_tokens()));
  for (const std::string end : {"\n", "\r\n"}) {
    const ScratchFile merges("merges.txt", "#version: 0.2" + end + joined(kMerges, end));
    const auto bpe = read_bpe_tokenizer(vocab.path(), merges.path());
    CHECK(bpe->encode("hello world") == Ids{kHello, kSpaceWo, 'r', 'l', 'd'});
    CHECK(bpe->state() == tiny_bpe().state());
  }
}

TEST_CASE("a byte order mark before the merges is skipped") {
  const ScratchFile vocab("vocab.json", "\xEF\xBB\xBF" + vocab_json(tiny_tokens()));
  for (const std::string head : {"#version: 0.2\n", ""}) {
    const ScratchFile merges("merges.txt", "\xEF\xBB\xBF" + head + joined(kMerges, "\n"));
    CHECK(read_bpe_tokenizer(vocab.path(), merges.path())->state() == tiny_bpe().state());
  }
}

TEST_CASE("tokens that no merge makes are special: any in brackets, and 64 others") {
  const auto read = [](const Lines& tokens, const Lines& merges) {
    const ScratchFile vocab("vocab.json", vocab_json(tokens)),
        list("merges.txt", joined(merges, "\n"));
    std::string message = message_of([&] { (void)read_bpe_tokenizer(vocab.path(), list.path()); });
    return message.empty() ? message : message.substr(list.path().size());
  };
  CHECK(tiny_bpe().special_tokens() == Ids{kEnd});
  CHECK(tokenizer_of(tiny_tokens(), {"h e"}).special_tokens() ==
        Ids{257, 258, 259, 260, 261, 262, 263, 264});
  CHECK(ByteTokenizer().special_tokens().empty());

  Lines named = tiny_tokens(), more = tiny_tokens();
  for (int i = 0; i < 100; ++i)
    named.push_back((i % 2 ? "<s" : "[s") + std::to_string(i) + (i % 2 ? ">" : "]"));
  CHECK(read(named, kMerges).empty());
  for (int i = 0; i < 64; ++i) more.push_back("word" + std::to_string(i));
  CHECK(read(more, kMerges).empty());
  const std::string end = "; the file is cut off or belongs to another vocabulary",
                    of = " of the 329 tokens of ";
  const std::string cut = read(more, {"h e", "l l"});
  CHECK(cut.starts_with(": no line makes 70" + of));
  CHECK(cut.ends_with("vocab.json, the first of them \"hell\"" + end));
  CHECK(read(more, {}).starts_with(": no line makes 72" + of));
  for (const char* word : {"<>", "[s", "<s]", "a>", "<s"}) {
    Lines one = more;
    one.push_back(word);
    CHECK(read(one, kMerges).starts_with(": no line makes 65"));
  }
}

TEST_CASE("a bad vocabulary is named in one sentence") {
  const ScratchFile merges("merges.txt", joined(kMerges, "\n"));
  const auto message = [&](const std::string& vocab_json) {
    const ScratchFile vocab("vocab.json", vocab_json);
    const std::string text =
        message_of([&] { (void)read_bpe_tokenizer(vocab.path(), merges.path()); });
    REQUIRE(text.starts_with(vocab.path() + ": "));
    return text.substr(vocab.path().size() + 2);
  };
  CHECK(message("{\"a\": 0,}") == "not JSON from byte 9 of 9 on");
  CHECK(message("") == "not JSON from byte 1 of 0 on");
  CHECK(message("[1]") == "the file must hold a JSON object from tokens to ids");
  CHECK(message("{}") == "the file must hold a JSON object from tokens to ids");
  CHECK(message(R"({"a": 0, "b": 2})") ==
        "the ids of 2 tokens must be 0 to 1 without a gap, but \"b\" has 2");
  CHECK(message(R"({"a": -1, "b": 0})") ==
        "the ids of 2 tokens must be 0 to 1 without a gap, but \"a\" has -1");
  CHECK(message(R"({"a": 0, "b": 1, "a": 2})") == "the token \"a\" stands there twice");
  CHECK(message(R"({"a": 1, "b": 1})") == "the tokens \"a\" and \"b\" have the same id 1");
  CHECK(message(R"({"a": "0"})") ==
        "the token \"a\" has a string as its id, it must be a whole number");
  CHECK(message(R"({"a": 0.5})") ==
        "the token \"a\" has a number as its id, it must be a whole number");
  CHECK(message(R"({"": 0})") == "the token \"\" with id 0 is empty");
  CHECK(message(R"({"a b": 0})") ==
        "the token \"a b\" with id 0 has a character that stands for no byte");
  CHECK(message(R"({"a": 0, "b": 1})") == "no token for byte 0 among 2");
}

TEST_CASE("a bad list of merges is named in one sentence") {
  const auto message = [](const Lines& merges) {
    return message_of([&] { (void)tokenizer_of(tiny_tokens(), merges); });
  };
  CHECK(message({"#version: 0.2", "h e", "he"}) ==
        "merges.txt line 3: \"he\" must be two tokens with one space between");
  for (const char* line : {"a ", " a", "a  b", "a b c", " "})
    CHECK(message({line}) == std::string("merges.txt line 1: \"") + line +
                                 "\" must be two tokens with one space between");
  CHECK(message({"h e", "", "x y"}) ==
        "merges.txt line 3: \"xy\" is not in the vocabulary of 265 tokens");
  CHECK(message({"xyz h"}) == "merges.txt line 1: \"xyz\" is not in the vocabulary of 265 tokens");
  CHECK(message({"h e", "h e"}) ==
        "merges.txt line 2: the pair \"h\" and \"e\" has been merged by an earlier line");
  CHECK(message({"#version: 0.2"}).empty());
  CHECK(message({"h e", "#version: 0.2"}) ==
        "merges.txt line 2: \"#version:\" is not in the vocabulary of 265 tokens");
}

TEST_CASE("control bytes of a bad file are spelled out, and the sentence goes on behind a NUL") {
  const ScratchFile merges("merges.txt", joined(kMerges, "\n")),
      vocab("vocab.json", R"({"a\u001b\u0000b": 0})");
  CHECK(message_of([&] { (void)read_bpe_tokenizer(vocab.path(), merges.path()); }) ==
        vocab.path() +
            ": the token \"a\\x1B\\x00b\" with id 0 has a character that stands for no byte");
  CHECK(message_of([&] {
          (void)tokenizer_of(tiny_tokens(), {std::string("\x1b[2J\0", 5) + "\xC2\x9B"});
        }) ==
        "merges.txt line 1: \"\\x1B[2J\\x00\\xC2\\x9B\" must be two tokens with one space between");
  const std::string umlauts(39, 'u'), cut = umlauts + "\xC3\xA4 and more";
  CHECK(message_of([&] {
          (void)tokenizer_of(tiny_tokens(), {cut});
        }).find('"' + umlauts + "...\"") != std::string::npos);
  CHECK(message_of([] {
          (void)tokenizer_from(R"({"tokenizer": "wo\u0007rds"})");
        }).find("the tokenizer is \"wo\\x07rds\", it must be bytes") == 0);
  CHECK(message_of([] { (void)tokenizer_from("\"" + std::string(1 << 20, 'x')); }).size() < 400);
  CHECK(message_of([] {
          (void)parse_instructions("{\"instruction\": \"\x1b\"}", "a\nb");
        }).find("a\\x0Ab line 1: ") == 0);
}

TEST_CASE("a file of another kind says what it is, and a text may be a page of HTML") {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
                    page = "<!DOCTYPE html>\n<html></html>";
  const ScratchFile good("good.json", vocab_json(tiny_tokens())), lfs("lfs", pointer),
      html("html", page), zip("zip", "PK\x03\x04");
  const std::string is_lfs = ": the file begins like a Git LFS pointer: fetch the file itself";
  CHECK(message_of([&] { (void)read_bpe_tokenizer(lfs.path(), lfs.path()); }) ==
        lfs.path() + is_lfs);
  CHECK(message_of([&] { (void)read_bpe_tokenizer(good.path(), lfs.path()); }) ==
        lfs.path() + is_lfs);
  CHECK(message_of([&] { (void)read_instructions(html.path()); }) ==
        html.path() + ": the file begins like an HTML page: fetch the file itself");
  CHECK(message_of([&] { (void)read_text_file(lfs.path(), Content::text); }) ==
        lfs.path() + is_lfs);
  CHECK(message_of([&] {
          (void)read_text_file(zip.path(), Content::text);
        }).starts_with(zip.path() + ": the file begins like a zip archive"));
  CHECK(read_text_file(html.path(), Content::text) == page);
  for (const ScratchFile* file : {&lfs, &html, &zip})
    CHECK_FALSE(read_text_file(file->path(), Content::bytes).empty());
}

TEST_CASE("a file that is not there is named") {
  const ScratchFile vocab("vocab.json", vocab_json(tiny_tokens()));
  const std::string none = vocab.path() + ".none";
  const std::string missing = none + ": cannot open the file (No such file or directory)";
  CHECK(message_of([&] { (void)read_bpe_tokenizer(none, none); }) == missing);
  CHECK(message_of([&] { (void)read_bpe_tokenizer(vocab.path(), none); }) == missing);
  CHECK(message_of([&] { (void)read_instructions(none); }) == missing);
}

TEST_CASE("a tokenizer comes back from its state") {
  const std::string text = "hello world, aaaaa";
  const CharacterTokenizer characters(alphabet_of(text + "\n\"\\é"));
  const BpeTokenizer bpe = tiny_bpe();
  const ByteTokenizer bytes;
  for (const Tokenizer* tokenizer :
       std::initializer_list<const Tokenizer*>{&bytes, &characters, &bpe}) {
    INFO(tokenizer->name());
    const auto copy = tokenizer_from(tokenizer->state());
    CHECK(copy->name() == tokenizer->name());
    CHECK(copy->state() == tokenizer->state());
    CHECK(copy->vocab_size() == tokenizer->vocab_size());
    CHECK(copy->end_of_text() == tokenizer->end_of_text());
    CHECK(copy->encode(text) == tokenizer->encode(text));
    CHECK(copy->decode(copy->encode(text)) == text);
  }
}

TEST_CASE("a damaged state is told") {
  CHECK(message_of([&] { (void)tokenizer_from(R"({"tokenizer": "words"})"); }) ==
        "the tokenizer is \"words\", it must be bytes, characters, numbers or gpt2");
  const std::string damaged = "the tokenizer is damaged: ";
  for (const char* state :
       {"", "{", "[]", "{}", R"({"tokenizer": 1})", R"({"tokenizer": "characters"})",
        R"({"tokenizer": "gpt2"})", R"({"tokenizer": "gpt2", "tokens": [1], "merges": []})"})
    CHECK(message_of([&] { (void)tokenizer_from(state); }).starts_with(damaged));
  CHECK(message_of([&] {
          (void)tokenizer_from(R"({"tokenizer": "gpt2", "tokens": [], "merges": []})");
        }) == "tokenizer state, tokens: no token for byte 0 among 0");
  Lines twice = tiny_tokens();
  twice.back() = "h";
  CHECK(message_of([&] { (void)tokenizer_of(twice, {}); }) ==
        "vocab.json: the token \"h\" stands there twice, again with id 264");
}

TEST_CASE("a stream of tokens gives whole characters, and all of them") {
  const ByteTokenizer bytes;
  StreamDecoder decoder(bytes);
  const auto pushed = [&](std::string_view text) {
    Lines parts;
    for (const Index id : bytes.encode(text)) parts.push_back(decoder.push(id));
    return parts;
  };
  CHECK(pushed("aé€😀") == Lines{"a", "", "é", "", "", "€", "", "", "", "😀"});
  CHECK(decoder.finish().empty());
  const std::string bad = "\uFFFD";
  CHECK(pushed("\xE2(") == Lines{"", bad + "("});
  CHECK(pushed("\xFF\x80") == Lines{bad, bad});
  CHECK(pushed("\xF0\x9F\xC3\xA9") == Lines{"", "", bad, "é"});
  CHECK(pushed("\xE2\x82") == Lines{"", ""});
  CHECK(decoder.finish() == bad);
  CHECK(decoder.finish().empty());
  CHECK(pushed("b") == Lines{"b"});
}

TEST_CASE("a stream of GPT-2's tokens is the decoded text") {
  const BpeTokenizer bpe = tiny_bpe();
  StreamDecoder decoder(bpe);
  const std::string text = "hello wörld 日本 😀 aaaaa";
  std::string streamed;
  for (const Index id : bpe.encode(text)) streamed += decoder.push(id);
  CHECK(streamed + decoder.finish() == text);
}

TEST_CASE("a text has a training part and a hold-out without overlap") {
  const TextData data(counting(100), 8, 0.25);
  CHECK(data.training_tokens() == 75);
  CHECK(data.validation_tokens() == 25);
  std::set<Index> starts;
  for (std::uint64_t step = 0; step < 200; ++step) {
    const Batch batch = data.training_batch(3, 5, step);
    REQUIRE((batch.rows == 3 && batch.len == 8));
    for (Index row = 0; row < 3; ++row) {
      const Ids inputs = row_of(batch.inputs, batch, row);
      const Ids targets = row_of(batch.targets, batch, row);
      for (std::size_t i = 0; i < 8; ++i) {
        CHECK(inputs[i] == inputs[0] + Index(i));
        CHECK(targets[i] == inputs[i] + 1);
      }
      CHECK(targets.back() < 75);
      starts.insert(inputs[0]);
    }
  }
  // All 75 - 8 windows, the first and the last among them.
  CHECK(starts.size() == 67);
}

TEST_CASE("training windows depend on seed and step alone") {
  const TextData data(counting(10000), 4, 0.1);
  CHECK(same(data.training_batch(4, 1, 2), data.training_batch(4, 1, 2)));
  CHECK_FALSE(same(data.training_batch(4, 1, 2), data.training_batch(4, 1, 3)));
  CHECK_FALSE(same(data.training_batch(4, 1, 2), data.training_batch(4, 2, 2)));
  const Batch few = data.training_batch(2, 1, 2), many = data.training_batch(4, 1, 2);
  CHECK(row_of(few.inputs, few, 1) == row_of(many.inputs, many, 1));
  // The same on every machine.
  CHECK(data.training_batch(3, 1, 0).inputs ==
        Ids{6514, 6515, 6516, 6517, 1108, 1109, 1110, 1111, 2052, 2053, 2054, 2055});
}

TEST_CASE("Numbers are tokens by themselves") {
  const NumberTokenizer numbers(12);
  CHECK(numbers.vocab_size() == 12);
  CHECK(numbers.encode("0 11 7 ") == std::vector<Index>{0, 11, 7});
  CHECK(numbers.encode("0 11 7") == std::vector<Index>{0, 11, 7});
  CHECK(numbers.encode("").empty());
  CHECK(numbers.decode(std::vector<Index>{0, 11, 7}) == "0 11 7 ");
  const auto again = tokenizer_from(numbers.state());
  CHECK(again->name() == "numbers");
  CHECK(again->vocab_size() == 12);
  CHECK(again->state() == numbers.state());
  for (const std::string text : {"3 12", "3 -1", "3 x", "3 4x", "3  4"})
    CHECK(message_of([&] { (void)numbers.encode(text); }) ==
          "\"" + (text == "3  4" ? "" : text.substr(2)) +
              "\" at byte 2 is none of the numbers from 0 to 11 that are tokens");
  for (const Index count : {Index(0), NumberTokenizer::kMost + 1})
    CHECK(message_of([&] {
            (void)tokenizer_from("{\"tokenizer\":\"numbers\",\"count\":" + std::to_string(count) +
                                 "}");
          }) ==
          "the tokenizer has " + std::to_string(count) + " numbers, it must have 1 to 1048576");
}

TEST_CASE("validation windows have each target of the hold-out once, in order") {
  const TextData data(counting(100), 8, 0.25);
  REQUIRE(data.validation_windows() == 3);
  Batch all = data.validation_batch(0, 3);
  CHECK(all.inputs == [] {
    Ids ids = counting(24);
    for (Index& id : ids) id += 75;
    return ids;
  }());
  CHECK(all.targets.front() == 76);
  CHECK(all.targets.back() == 99);
  const Batch tail = data.validation_batch(2, 5);
  CHECK(tail.rows == 1);
  CHECK(tail.inputs == row_of(all.inputs, all, 2));
  CHECK(tail.targets == row_of(all.targets, all, 2));
}

TEST_CASE("a shorter last window is filled up without targets") {
  const TextData data(counting(30), 4, 0.25);  // 7.5 is rounded to 8
  REQUIRE(data.validation_tokens() == 8);
  REQUIRE(data.validation_windows() == 2);
  const Batch batch = data.validation_batch(0, 2);
  CHECK(batch.inputs == Ids{22, 23, 24, 25, 26, 27, 28, 0});
  CHECK(batch.targets == Ids{23, 24, 25, 26, 27, 28, 29, -100});
}

TEST_CASE("a hold-out has at least one window, or nothing") {
  for (const double fraction : {1e-9, 0.01}) {
    const TextData data(counting(10), 4, fraction);
    CHECK(data.validation_tokens() == 5);
    CHECK(data.validation_windows() == 1);
    CHECK(data.training_batch(1, 1, 1).inputs == Ids{0, 1, 2, 3});
  }
  const TextData all(counting(5), 4, 0);
  CHECK(all.validation_tokens() == 0);
  CHECK(all.validation_windows() == 0);
  CHECK(all.training_batch(1, 1, 1).targets == Ids{1, 2, 3, 4});
  CHECK(message_of([&] { (void)TextData(counting(4), 4, 0); }) ==
        "the text has 4 tokens, sequences of 4 tokens (--len) need 4 + 1 to train on");
}

TEST_CASE("a text that is too short is told with both numbers") {
  CHECK(message_of([&] { (void)TextData(counting(9), 4, 0.1); }) ==
        "the text has 9 tokens, sequences of 4 tokens (--len) need 4 + 1 to train on and as many "
        "held out");
  CHECK(message_of([&] { (void)TextData(counting(20), 4, 0.9); }) ==
        "the text has 20 tokens, 18 are held out (--held-out), the other 2 must be more than the "
        "tokens of a sequence, 4 (--len)");
  CHECK_THROWS(TextData(counting(10), 4, 0.6));
  CHECK_NOTHROW(TextData(counting(11), 4, 0.5));
  CHECK(message_of([&] { (void)TextData(counting(20), 0, 0.1); }) ==
        "TextData: len is 0, must be at least 1");
  CHECK(message_of([&] { (void)TextData(counting(20), 4, 1); }) ==
        "TextData: held_out is 1, must be in [0, 1)");
  CHECK(message_of([&] { (void)TextData(counting(20), 4, -0.5); }) ==
        "TextData: held_out is -0.5, must be in [0, 1)");
  const TextData data(counting(20), 4, 0.1);
  CHECK(message_of([&] { (void)data.validation_batch(1, 1); }) ==
        "TextData::validation_batch: first is 1, but there are 1 windows");
  CHECK(message_of([&] { (void)data.validation_batch(0, 0); }) ==
        "TextData::validation_batch: rows is 0, must be at least 1");
  CHECK(message_of([&] { (void)data.training_batch(0, 1, 1); }) ==
        "TextData::training_batch: rows is 0, must be at least 1");
}

TEST_CASE("a prompt names its input only if there is one") {
  CHECK(prompt_of({"Add.", "1 2", "3"}) == "### Prompt:\nAdd.\nInput: 1 2\n### Response:");
  CHECK(prompt_of({"Add.", "", "3"}) == "### Prompt:\nAdd.\n### Response:");
  CHECK(prompt_of({"Add.", " \n\t", "3"}) == "### Prompt:\nAdd.\n### Response:");
}

TEST_CASE("flat and nested instructions are read, each instance an example") {
  const auto examples = parse_instructions(
      "{\"instruction\": \"A\", \"input\": \"x\", \"output\": \"1\"}\r\n"
      "\n"
      "{\"instruction\": \"B\", \"output\": \"2\", \"id\": 7}\n"
      "{\"instruction\": \"C\", \"instances\": [{\"input\": \"\", \"output\": \"3\"},"
      " {\"input\": \"y\", \"output\": \"4\"}]}",
      "data.jsonl");
  REQUIRE(examples.size() == 4);
  const auto text = [&](std::size_t i) {
    return examples[i].instruction + "|" + examples[i].input + "|" + examples[i].output;
  };
  CHECK(text(0) == "A|x|1");
  CHECK(text(1) == "B||2");
  CHECK(text(2) == "C||3");
  CHECK(text(3) == "C|y|4");
}

TEST_CASE("a bad line of instructions is named with its number") {
  const auto message = [](const std::string& line) {
    const std::string good = "{\"instruction\": \"A\", \"output\": \"1\"}\n\n";
    const std::string text =
        message_of([&] { (void)parse_instructions(good + line + "\n" + good, "data.jsonl"); });
    const std::string place = "data.jsonl line 3: ";
    REQUIRE(text.starts_with(place));
    return text.substr(place.size());
  };
  CHECK(message("{\"instruction\": }") == "not JSON from byte 17 of 17 on");
  CHECK(message("[1]") == "the line must be a JSON object, it is a JSON array");
  CHECK(message(R"({"output": "1"})") == "the field \"instruction\" is missing");
  CHECK(message(R"({"instruction": "A"})") == "the field \"output\" is missing");
  CHECK(message(R"({"instruction": "A", "output": 1})") ==
        "\"output\" must be text, it is a JSON number");
  CHECK(message(R"({"instruction": "A", "input": null, "output": "1"})") ==
        "\"input\" must be text, it is a JSON null");
  CHECK(message(R"({"instruction": "A", "instances": []})") ==
        "\"instances\" must be a list of at least one instance");
  CHECK(message(R"({"instruction": "A", "instances": ["x"]})") ==
        "each instance must be a JSON object, one is a string");
  CHECK(message(R"({"instruction": "A", "instances": [{"input": "x"}]})") ==
        "the field \"output\" is missing");
  CHECK(message("{\"instruction\": \"\xFF\"}").starts_with("not JSON from byte"));
  CHECK_FALSE(message("1e999").empty());
  CHECK(message_of([&] { (void)parse_instructions("\n\n", "data.jsonl"); }) ==
        "data.jsonl: none of its 2 lines holds an instruction");
}

TEST_CASE("the loss counts the response and the end of text, not the prompt") {
  const BpeTokenizer bpe = tiny_bpe();
  const std::vector<Instruction> examples = {{"Q", "", "hello"}, {"Q", "x", "hello world"}};
  const InstructionData data(examples, bpe, 200);
  CHECK(data.cut_count() == 0);
  const Batch batch = data.batch(Ids{0, 1});
  for (Index row = 0; row < 2; ++row) {
    const Instruction& example = examples[std::size_t(row)];
    Ids whole = bpe.encode(prompt_of(example) + " " + example.output);
    whole.push_back(kEnd);
    const std::size_t prompt = bpe.encode(prompt_of(example)).size();
    const Ids inputs = row_of(batch.inputs, batch, row);
    const Ids targets = row_of(batch.targets, batch, row);
    for (std::size_t i = 0; i < std::size_t(batch.len); ++i) {
      CHECK(inputs[i] == (i + 1 < whole.size() ? whole[i] : kEnd));
      CHECK(targets[i] == (i + 1 < whole.size() && i + 1 >= prompt ? whole[i + 1] : -100));
    }
    if (row == 1) CHECK(Index(whole.size()) == batch.len + 1);
  }
}

TEST_CASE("the targets of an example spell its response") {
  const ByteTokenizer bytes;
  const InstructionData data({{"Say.", "", "yes"}}, bytes, 100);
  const Batch batch = data.batch(Ids{0});
  std::string inputs = bytes.decode(batch.inputs), response;
  for (const Index target : batch.targets)
    if (target != kNoTarget) response += bytes.decode(Ids{target});
  CHECK(inputs == "### Prompt:\nSay.\n### Response: ye");
  CHECK(response == " yes");
  CHECK(std::count(batch.targets.begin(), batch.targets.end(), -100) == 29);
}

TEST_CASE("a long example loses the beginning of its prompt, then the end of its response") {
  const ByteTokenizer bytes;
  const std::string question(50, 'q');
  const auto cut = [&](const Instruction& example, Index len) {
    const InstructionData data({example}, bytes, len);
    const Batch batch = data.batch(Ids{0});
    std::string response;
    for (const Index target : batch.targets)
      if (target != kNoTarget) response += bytes.decode(Ids{target});
    CHECK(data.cut_count() == 1);
    CHECK(batch.len == len);
    return bytes.decode(batch.inputs) + "|" + response;
  };
  // 21 bytes of 26 are left for the prompt of 76: the response is whole.
  CHECK(cut({question, "", "1234"}, 25) == "qqqqqqq\n### Response: 123| 1234");
  // Half of 32 bytes each.
  CHECK(cut({question, "", "0123456789abcdefghij"}, 31) ==
        "qq\n### Response: 0123456789abcd| 0123456789abcde");
  // A prompt below half stays whole: 30 of 64 bytes.
  const std::string answer = "0123456789012345678901234567890123456789";
  CHECK(cut({"Say.", "", answer}, 63) ==
        "### Prompt:\nSay.\n### Response: " + answer.substr(0, 32) + "| " + answer.substr(0, 33));
}

TEST_CASE("an example that just fits is not cut") {
  const ByteTokenizer bytes;
  const std::vector<Instruction> examples = {{"Say.", "", "yes"}};  // 30 + 4 bytes
  CHECK(InstructionData(examples, bytes, 33).cut_count() == 0);
  CHECK(InstructionData(examples, bytes, 32).cut_count() == 1);
  CHECK(message_of([&] { (void)InstructionData(examples, bytes, 1); }) ==
        "--len is 1, --instructions needs at least 2");
  CHECK(message_of([&] { (void)InstructionData(examples, bytes, 33).batch(Ids{1}); }) ==
        "InstructionData::batch: example 1 is asked for, but there are 1");
}

TEST_CASE("each epoch has all examples, in an order of its own") {
  Ids order = example_order(100, 3, 0);
  CHECK(order == example_order(100, 3, 0));
  CHECK(order != example_order(100, 3, 1));
  CHECK(order != example_order(100, 4, 0));
  CHECK(order != counting(100));
  std::sort(order.begin(), order.end());
  CHECK(order == counting(100));
  CHECK(example_order(0, 3, 0).empty());
  CHECK(example_order(8, 1, 0) == Ids{3, 2, 5, 1, 4, 0, 7, 6});

  // Each of 6 orders of 3 examples in a sixth of 6000 epochs; the standard deviation is 29.
  std::map<Ids, int> seen;
  for (std::uint64_t epoch = 0; epoch < 6000; ++epoch) ++seen[example_order(3, 9, epoch)];
  REQUIRE(seen.size() == 6);
  for (const auto& [permutation, times] : seen) CHECK(std::abs(times - 1000) < 150);
}
