// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns a text into the inputs of an attention call:
//
//   x_t = rms_norm(embedding[byte_t] + position(t))          input_h = x W_h
//
// The embedding of a byte and the matrices W_h are normal numbers of (seed, place) alone, W_h with
// standard deviation 1 / sqrt(width), so that entries of query, key and value, and their scaled dot
// products, are about 1 in size. Positions are the sinusoids of Vaswani et al. (2017), section 3.5.

#include <heed/core/view.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace compare {

using heed::Index;

// The text of a comparison without --text: about 3 KB of prose, written for this program.
[[nodiscard]] const std::string& default_text();

// The bytes of a file; throws UsageError when it cannot be read or is empty.
[[nodiscard]] std::string read_text(const std::string& path, const std::string& option = "--text");

class TextInput {
 public:
  static constexpr Index width = 128;  // width of x

  // `text` is repeated until batch * len tokens are there; it must not be empty.
  TextInput(const std::string& text, Index batch, Index len, std::uint64_t seed);

  [[nodiscard]] Index batch() const { return batch_; }
  [[nodiscard]] Index len() const { return len_; }

  // A projection of the text, (batch, heads, len, dim); each `stream` gives another one.
  [[nodiscard]] std::vector<double> project(std::uint64_t stream, Index heads, Index dim) const;

 private:
  Index batch_, len_;
  std::uint64_t seed_;
  std::vector<double> x_;  // (batch, len, width)
};

}  // namespace compare
