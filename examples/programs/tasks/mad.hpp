// SPDX-License-Identifier: Apache-2.0
#pragma once

// Five of the six tasks of mechanistic architecture design (MAD); the sixth, recall without noise, is noisy-recall with
// noise=0. x -> y says that y is the answer behind x.
//
//   noisy-recall    k1 v1  n n  k2 v2  k1 -> v1 v1  n n ...  k2 -> v2
//                   n = len / 2 pairs. Each but the last is noise with probability `noise`, two tokens of a vocabulary of
//                   its own, but for one that never is; else a key, drawn evenly, and its value, drawn evenly when the
//                   key comes first in a sequence. The last pair has a key that was shown. Every key that was shown
//                   before asks for its value.
//   fuzzy-recall    keys and values are one to three tokens: a b -> x y z   c -> u   a b -> x y z
//                   A size is drawn evenly, then as many different tokens. One pair, the probe, is put in when `at`
//                   tokens stand there, `at` drawn evenly, or at the last place that has room for it, and again at the
//                   end. Every key that was shown before asks for all tokens of its value. In validation and tests all
//                   keys have the largest size. Padding in front fills the sequence up to len.
//   selective-copy  . x . . y . z C . . .     behind C the blanks ask for x, y, z, in their order
//                   Each blank of the first part stands in front of a token to copy that is drawn evenly.
//   compress        x1 ... xn C R ... R       the i-th R asks for xi, and may see nothing before C Task::bottleneck() is
//                   the position of C: all information about x1 ... xn has to pass through it.
//   memorise        k I k I ...               I asks for the value of k in a map that never changes
//
// Published   noisy-recall: len 128, vocabulary 32, 16 of them noise, noise 0.2. fuzzy-recall: len 128, vocabulary 16,
//             sizes up to 3. selective-copy: len 256, vocabulary 16, 16 tokens to copy. compress: len 32, vocabulary 16.
//             memorise: len 32, vocabulary 256. 12,800 training sequences (memorise 256); here each is new.
// Shrunken    noisy-recall: len 64. fuzzy-recall: len 64, sizes up to 2. selective-copy: len 64, 8 tokens to copy.
//             compress: len 8. memorise: vocabulary 64.
// Difficulty  noisy-recall, fuzzy-recall: tokens since the value was last shown. selective-copy, compress: which of the
//             tokens, from 0. memorise: none.
// Source      Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures", section 3 and appendix B;
//             athms/mad-lab, mad/data/instances.py with multi_query, and configs/tasks.
// Differs     The source trains both recall tasks on all tokens; here the loss counts answers. It may put the probe behind
//             the last pair of a fuzzy sequence, and then asks for a value that was never shown. compress: the source adds
//             a sinusoid to the state of C and decodes each sum by an MLP. Here the model's own blocks behind the first
//             decode, from positions that see C and each other, and R is one more token. memorise: another random map than
//             numpy's.

#include "parameters.hpp"

namespace tasks {

class NoisyRecall final : public Task {
 public:
  struct Options {
    Index len = 128, vocabulary = 32, noise_vocabulary = 16;
    double noise = 0.2;
  };
  static Description<Options> describe();

  explicit NoisyRecall(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len - 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

class FuzzyRecall final : public Task {
 public:
  struct Options {
    Index len = 128, vocabulary = 16, key_tokens = 3, value_tokens = 3;
  };
  static Description<Options> describe();

  explicit FuzzyRecall(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

class SelectiveCopy final : public Task {
 public:
  struct Options {
    Index len = 256, vocabulary = 16, copies = 16;
  };
  static Description<Options> describe();

  explicit SelectiveCopy(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
};

class Compress final : public Task {
 public:
  struct Options {
    Index len = 32, vocabulary = 16;  // C is counted in both
  };
  static Description<Options> describe();

  explicit Compress(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary + 1; }
  [[nodiscard]] Index len() const override { return 2 * options_.len - 1; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;
  [[nodiscard]] std::optional<Index> bottleneck() const override { return options_.len - 1; }

 private:
  Options options_;
};

class Memorise final : public Task {
 public:
  struct Options {
    Index len = 32, vocabulary = 256, map = 12345;
  };
  static Description<Options> describe();

  explicit Memorise(const Options& options);
  [[nodiscard]] Index vocabulary() const override { return options_.vocabulary; }
  [[nodiscard]] Index len() const override { return options_.len; }
  [[nodiscard]] Sequence sequence(const Place& place) const override;

 private:
  Options options_;
  std::vector<Index> values_;  // value of each key
};

}  // namespace tasks
