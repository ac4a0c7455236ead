// SPDX-License-Identifier: Apache-2.0
#pragma once

// The flip-flop language: a memory of one bit.
//
//   w 1  i 0  r -> 1 1  i 1  w 0  i 1  r -> 0
//
// T / 2 instructions, each followed by a bit: w writes its bit into the memory, r reads the memory, i is to be ignored.
// The first is w, the last r; each between is i with probability p_i, else w or r evenly. Bits behind w and i are
// uniform, the bit behind r is the memory. Every r asks for its bit.
//
// Published   T 512, p_i 0.8 in training, 0.98 ("sparse") and 0.1 ("dense") in tests.
// Shrunken    T 128.
// Difficulty  instructions since the last w.
// Source      Liu et al. 2023, "Exposing Attention Glitches with Flip-Flop Language Modeling", section 3; the data set
//             synthseq/flipflop.
// Differs     The source trains on all tokens; here the loss counts reads.

#include "parameters.hpp"

namespace tasks {

class FlipFlop final : public Task {
 public:
  struct Options {
    Index len = 512;
    double p_ignore = 0.8;
  };
  static Description<Options> describe();

  static constexpr Index write = 0, read = 1, ignore = 2, zero = 3, one = 4;

  explicit FlipFlop(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return 5; }
  [[nodiscard]] Index len() const override { return options_.len - 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] std::vector<Test> tests() const override;

 private:
  Options options_;
};

}  // namespace tasks
