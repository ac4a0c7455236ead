// SPDX-License-Identifier: Apache-2.0
#pragma once

// Readers of bytes that somebody else wrote, each with what it promises whatever the bytes: it takes them, or refuses them by
// one sentence. A breach throws std::logic_error or ends the program, which libFuzzer (heed_fuzz_bytes) and bytes_test
// report. Each folder here has bytes of the reader of its name, which the fuzzer found to reach code of their own.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>

namespace heed_bytes {

using Bytes = std::span<const std::uint8_t>;

struct Input {
  const char* name;
  bool (*run)(Bytes);  // true where the bytes are taken
};
// All of them; readers.cpp and calls.cpp define them.
[[nodiscard]] bool safetensors(Bytes bytes);
[[nodiscard]] bool checkpoint(Bytes bytes);
[[nodiscard]] bool vocabulary(Bytes bytes);
[[nodiscard]] bool merges(Bytes bytes);
[[nodiscard]] bool instructions(Bytes bytes);
[[nodiscard]] bool memory(Bytes bytes);
[[nodiscard]] bool dlpack(Bytes bytes);
[[nodiscard]] bool c_call(Bytes bytes);
[[nodiscard]] bool command_line(Bytes bytes);
inline constexpr Input kInputs[] = {{"safetensors", safetensors},
                                    {"checkpoint", checkpoint},
                                    {"vocabulary", vocabulary},
                                    {"merges", merges},
                                    {"instructions", instructions},
                                    {"memory", memory},
                                    {"dlpack", dlpack},
                                    {"c_call", c_call},
                                    {"command_line", command_line}};

// A sentence that lists all variants is the longest.
inline constexpr std::size_t kSentence = 1500;

inline void demand(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error(what);
}

// True if `call` returns, false if it refuses: by a Refusal of one sentence that begins with `who`.
template <class... Refusals, class Call>
[[nodiscard]] bool taken(const std::string& who, const Call& call) {
  std::string text;
  const auto refuses = [&]<class Refusal>() {
    return [&](const std::exception& error) {
      return dynamic_cast<const Refusal*>(&error) != nullptr;
    };
  };
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    if (!(refuses.template operator()<Refusals>()(error) || ...)) throw;
    text = error.what();
  }
  demand(text.starts_with(who), "a refusal without its source: " + text);
  demand(text.find('\n') == text.npos && text.size() < kSentence,
         "a refusal of more than a sentence: " + text);
  return false;
}

// Numbers drawn from bytes; 0 behind their end.
class Draws {
 public:
  explicit Draws(Bytes bytes) : rest_(bytes) {}
  [[nodiscard]] std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t first = rest_.front();
    rest_ = rest_.subspan(1);
    return first;
  }
  [[nodiscard]] int below(int n) { return byte() % n; }
  // Mostly a small number; of 16 values of a byte one draws 8 more bytes.
  [[nodiscard]] std::int64_t number(int small) {
    const std::uint8_t first = byte();
    if (first < 240) return first % small;
    std::uint64_t any = 0;
    for (int i = 0; i < 8; ++i) any = any << 8 | byte();
    return std::int64_t(any);
  }
  [[nodiscard]] bool empty() const { return rest_.empty(); }

 private:
  Bytes rest_;
};

}  // namespace heed_bytes
