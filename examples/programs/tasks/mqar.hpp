// SPDX-License-Identifier: Apache-2.0
#pragma once

// Multi-query associative recall, and the same with values that are rewritten.
//
//   mqar             k1 v1 k2 v2 ... kP vP | . . k2 . . . k1 . ...       at each k of the second part: its v
//   mqar-forgetting  k1 v1 ... kP vP  k3 v3' k1 v1' ... | . . k1 . ...   at each k: the last v that it was given
//
// Keys are P different tokens of [1, V/2), first values P different tokens of [V/2, V). The second part has one slot of
// two tokens after another, and slot g = 0, 1, ... is taken by a query with weight (g + 1)^(a - 1): the first key draws
// a slot, then the second one among those that are left, and so on. A query is the first token of its slot. All other
// tokens of the second part are uniform over the whole vocabulary. U of the keys, drawn evenly, are rewritten, in random
// order; the new value is uniform over the values that differ from the key's first one.
//
// Published   mqar: V 8192, a 0.01, length and pairs 64:4, 128:8, 256:16, 512:64.  mqar-forgetting: V 8192, P 8, U 4.
// Shrunken    64:4 with V 64; mqar-forgetting: 64, P 4, U 2, V 64.
// Learnt      by plain attention of two blocks of width 64 in 300 and 700 steps of 64 sequences (bench/RESULTS.md).
// Difficulty  mqar: tokens from a key to its query. mqar-forgetting: 1 where the key was rewritten, else 0.
// Source      Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models", section 3 and
//             appendix on MQAR, figure 2; HazyResearch/zoology, multiquery_ar.py and forgetting_mqar.py.
// Differs     in the rewritten values: the source compares them with the first value of another key.

#include "parameters.hpp"

namespace tasks {

class Mqar final : public Task {
 public:
  struct Options {
    Index len = 512, pairs = 64, vocabulary = 8192;
    double power = 0.01;
  };
  static Description<Options> describe();

  explicit Mqar(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

class MqarForgetting final : public Task {
 public:
  struct Options {
    Index len = 64, pairs = 8, updates = 4, vocabulary = 8192;
    double power = 0.01;
  };
  static Description<Options> describe();

  explicit MqarForgetting(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

}  // namespace tasks
