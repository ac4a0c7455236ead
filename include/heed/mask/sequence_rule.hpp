// SPDX-License-Identifier: Apache-2.0
#pragma once

// A function of positions in a call of one sequence out of several: the function is given that
// sequence's number as its batch.

#include <heed/mask/classify.hpp>

#include <memory>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

class SequencePairs final : public PairFunction {
 public:
  SequencePairs(std::shared_ptr<const PairFunction> pairs, Index sequence)
      : pairs_(std::move(pairs)), sequence_(sequence) {}
  void fill(const PairBlock& at, std::uint64_t* words) const override {
    PairBlock of_all = at;
    of_all.batch += sequence_;
    pairs_->fill(of_all, words);
  }
  [[nodiscard]] bool depends_on_batch() const override { return pairs_->depends_on_batch(); }
  [[nodiscard]] bool depends_on_head() const override { return pairs_->depends_on_head(); }

 private:
  std::shared_ptr<const PairFunction> pairs_;
  Index sequence_;
};

// Passes batch 0 of a call to the rule as batch `sequence` of `batch`.
class SequenceRule final : public AskedRule {
 public:
  SequenceRule(std::shared_ptr<const PairRule> rule, Index sequence, Index sequences)
      : rule_(std::move(rule)), sequence_(sequence), sequences_(sequences) {}
  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    Geometry all = g;
    all.batch = sequences_;
    return std::make_shared<SequencePairs>(rule_->bind(all, where), sequence_);
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    return std::make_shared<SequenceRule>(rule_->moved(by), sequence_, sequences_);
  }
  [[nodiscard]] bool stands_at_first_key() const override { return rule_->stands_at_first_key(); }
  void add_to(Digest& digest) const override {
    digest.add(sequence_);
    digest.add(sequences_);
    rule_->add_to(digest);
  }

 private:
  std::shared_ptr<const PairRule> rule_;
  Index sequence_, sequences_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
