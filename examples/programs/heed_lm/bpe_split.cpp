// SPDX-License-Identifier: Apache-2.0
#include "bpe_split.hpp"

#include "text_utf8.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

namespace heed_lm {

namespace {

// GPT-2's pattern. White space is spelled out, since PCRE2's \s also has U+180E, which Unicode no longer counts as such.
[[nodiscard]] std::string gpt2_pattern() {
  const std::string space = R"(\t-\r\x{85}\p{Z})";
  return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{L}\p{N})" + space + "]+|[" + space +
         "]+(?![^" + space + "])|[" + space + "]+";
}

[[noreturn]] void fail_pcre2(const char* what, int code) {
  char text[256] = "";
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  throw std::runtime_error(std::string("BpeSplit: ") + what + " failed: " + text);
}

[[nodiscard]] std::size_t end_of_run(std::string_view text, std::size_t at, bool of_characters) {
  while (at < text.size()) {
    const Utf8Step step = utf8_step(text, at);
    if ((step.kind == Utf8::character) != of_characters) break;
    at += step.bytes;
  }
  return at;
}

}  // namespace

class BpeSplit::Pattern {
 public:
  Pattern() {
    int error = 0;
    PCRE2_SIZE place = 0;
    const std::string pattern = gpt2_pattern();
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &place, nullptr));
    if (!code_) fail_pcre2("pcre2_compile", error);
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // if this fails, matching interprets
    match_.reset(pcre2_match_data_create(1, nullptr));
    if (!match_) throw std::bad_alloc();
  }

  // Adds the pieces of valid UTF-8. Each character is matched by one of the pattern's branches, so
  // that each match begins where the last one ended.
  void add_pieces(std::string_view text, std::vector<std::string_view>& pieces) const {
    for (std::size_t at = 0; at < text.size();) {
      const int count = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                    text.size(), at, PCRE2_NO_UTF_CHECK, match_.get(), nullptr);
      if (count < 0) fail_pcre2("pcre2_match", count);
      const std::size_t end = pcre2_get_ovector_pointer(match_.get())[1];
      pieces.push_back(text.substr(at, end - at));
      at = end;
    }
  }

 private:
  struct FreeCode {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  struct FreeMatch {
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  std::unique_ptr<pcre2_code, FreeCode> code_;
  std::unique_ptr<pcre2_match_data, FreeMatch> match_;
};

BpeSplit::BpeSplit() : pattern_(std::make_unique<Pattern>()) {}
BpeSplit::~BpeSplit() = default;

std::vector<std::string_view> BpeSplit::pieces(std::string_view text) const {
  std::vector<std::string_view> found;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t valid = end_of_run(text, at, true);
    pattern_->add_pieces(text.substr(at, valid - at), found);
    at = end_of_run(text, valid, false);
    if (at > valid) found.push_back(text.substr(valid, at - valid));
  }
  return found;
}

}  // namespace heed_lm
