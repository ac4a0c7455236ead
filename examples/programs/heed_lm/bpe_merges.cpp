// SPDX-License-Identifier: Apache-2.0
#include "bpe_merges.hpp"

#include <cstddef>
#include <functional>
#include <queue>
#include <utility>

namespace heed_lm {

namespace {

// Ids stay below 2^32: a vocabulary of that size fits no memory.
[[nodiscard]] std::uint64_t pair_key(Index left, Index right) {
  return std::uint64_t(left) << 32 | std::uint64_t(right);
}

}  // namespace

bool BpeMerges::add(Rule rule) {
  const bool added = rank_.emplace(pair_key(rule.left, rule.right), rules_.size()).second;
  if (added) rules_.push_back(rule);
  return added;
}

std::optional<std::size_t> BpeMerges::rank(Index left, Index right) const {
  const auto found = rank_.find(pair_key(left, right));
  if (found == rank_.end()) return std::nullopt;
  return found->second;
}

// The tokens while they are merged. A merged token stands at the place of its first part; the places of its other parts
// are empty.
class BpeMerges::Chain {
 public:
  Chain(const BpeMerges& merges, std::vector<Index>& ids) : merges_(merges), ids_(ids) {
    for (std::size_t at = 0; at < ids.size(); ++at) {
      next_.push_back(at + 1);
      before_.push_back(at - 1);  // before the place that is first in the list; never read
    }
    for (std::size_t at = 0; at < ids.size(); ++at) queue_pair(at);
  }

  [[nodiscard]] bool done() const { return queue_.empty(); }

  // Merges all pairs of the earliest rule. Pairs that this creates count from the next round on.
  void merge_round() {
    const std::size_t rank = queue_.top().first;
    std::vector<std::size_t> merged;
    for (; !queue_.empty() && queue_.top().first == rank; queue_.pop())
      if (merge(merges_.rules_[rank], queue_.top().second)) merged.push_back(queue_.top().second);
    for (const std::size_t at : merged) {
      if (at > 0) queue_pair(before_[at]);
      queue_pair(at);
    }
  }

  void remove_empty_places() { std::erase(ids_, kEmpty); }

 private:
  static constexpr Index kEmpty = -1;

  void queue_pair(std::size_t at) {
    if (next_[at] == ids_.size()) return;
    if (const auto rank = merges_.rank(ids_[at], ids_[next_[at]])) queue_.emplace(*rank, at);
  }

  // False if an earlier merge has taken one of the two.
  [[nodiscard]] bool merge(const Rule& rule, std::size_t at) {
    const std::size_t right = next_[at];
    if (ids_[at] != rule.left || right == ids_.size() || ids_[right] != rule.right) return false;
    ids_[at] = rule.merged;
    ids_[right] = kEmpty;
    next_[at] = next_[right];
    if (next_[at] < ids_.size()) before_[next_[at]] = at;
    return true;
  }

  using Queued = std::pair<std::size_t, std::size_t>;  // rule, place of the left token
  const BpeMerges& merges_;
  std::vector<Index>& ids_;
  std::vector<std::size_t> next_, before_;
  std::priority_queue<Queued, std::vector<Queued>, std::greater<>> queue_;
};

void BpeMerges::apply(std::vector<Index>& ids) const {
  Chain chain(*this, ids);
  while (!chain.done()) chain.merge_round();
  chain.remove_empty_places();
}

}  // namespace heed_lm
