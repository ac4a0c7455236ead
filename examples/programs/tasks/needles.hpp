// SPDX-License-Identifier: Apache-2.0
#pragma once

// Needles among numbers: N cities have a number each, R of them are asked for.
//
//   hay 7 hay  CITY2 31  hay 12 4 hay  CITY1 8  ... hay | ASK CITY1 -> 8 8  CITY2 -> 31
//
// A needle is a city and its number; the N cities differ, and so do their numbers. One asked city's needle stands at a
// depth of 0, 25, 50, 75 or 100 % of the hay, drawn evenly; all others stand at random places. Hay is uniform over words
// and numbers, so that a number alone does not give a needle away. The R asked cities come in random order.
//
// Published   N:R = 1:1, 2:2, 4:2, 6:2 in a context of 4,096 tokens (and up to 64 K), needles that are sentences, "The
//             magic number of CITY is NUMBER", in a text.
// Shrunken    2:2 in 64 tokens, with 16 cities, numbers and words.
// Difficulty  the depth of the needle in the hay in %, rounded to a quarter.
// Source      Ye et al. 2024, "Differential Transformer", section 3.4: accuracy by depth (table 2, figure 5) and attention
//             on the answer and on noise (table 3). Answer::source is the number of the needle; its city stands in front.
// Differs     The source asks a language model in words. Here a needle is two tokens, the hay is random, and what is
//             asked is learnt from examples of the task.

#include "parameters.hpp"

namespace tasks {

class Needles final : public Task {
 public:
  struct Options {
    Index len = 4096, needles = 6, asked = 2, cities = 64, numbers = 256, words = 1024;
  };
  static Description<Options> describe();

  explicit Needles(const Options& options);
  // Cities from 0 on, then numbers, then words, then ASK.
  [[nodiscard]] Index vocabulary() const override {
    return options_.cities + options_.numbers + options_.words + 1;
  }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

}  // namespace tasks
