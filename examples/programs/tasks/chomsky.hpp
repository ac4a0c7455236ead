// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two regular languages, tested on strings that are longer than those of training.
//
//   parity       1 0 1 1 0 = -> 1            is the number of ones odd?
//   modular-sum  3 + 2 * 4 - 1 = -> 0        modulo 5; products before sums
//
// The length n of a string is uniform in [least, len]; for modular-sum an even n loses one. Bits, numbers below the
// modulus and the operators + - * are uniform. The token = asks for the result.
//
// Published   lengths 1 to 40 in training, tests up to 500; modulus 5.
// Shrunken    lengths 1 to 20.
// Tests       "2x": len + 1 to 2 len, "4x": 2 len + 1 to 4 len, "8x": 4 len + 1 to 8 len.
// Difficulty  n.
// Source      Deletang et al. 2022, "Neural Networks and the Chomsky Hierarchy", sections 4 and A: Parity Check and
//             Modular Arithmetic (Simple); google-deepmind/neural_networks_chomsky_hierarchy, tasks/regular.
// Differs     The source's batches have one length each; here each sequence has its own. Tests are named by factors of
//             len and end at 8.

#include "parameters.hpp"

namespace tasks {

class Parity final : public Task {
 public:
  struct Options {
    Index least = 1, len = 40;
  };
  static Description<Options> describe();

  explicit Parity(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return 3; }
  [[nodiscard]] Index len() const override { return options_.len + 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] std::vector<Test> tests() const override;

 private:
  Options options_;
};

class ModularSum final : public Task {
 public:
  struct Options {
    Index least = 1, len = 40, modulus = 5, products = 1;
  };
  static Description<Options> describe();

  explicit ModularSum(const Options& options);
  // Numbers below the modulus, then + - * =.
  [[nodiscard]] Index vocabulary() const override { return options_.modulus + 4; }
  [[nodiscard]] Index len() const override { return options_.len + 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] std::vector<Test> tests() const override;

 private:
  Options options_;
};

}  // namespace tasks
