// SPDX-License-Identifier: Apache-2.0
#pragma once

// The order in which the workers of a backward call visit groups of panels.

#include <heed/core/parallel.hpp>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The order in which groups of panels visit shared rows. A family is a set of heads that share some: the
// readers of one key-value head, or of one row of a broadcast bias or of query. A family's visitors come by turn. Where
// several calls run together, each has its own order, and numbers count the families of all of them, call by call.
struct VisitingOrder {
  Index batches, heads, groups;         // all; groups per head that are at hand
  Index family_batches, family_heads;   // per family
  Index first_group = 0;                // of each head, where others are elsewhere
  Index first_member = 0, members = 0;  // heads of each family that are visited; 0: all

  struct Visit {
    Index batch, head, group;  // what to do
    Index family, turn;        // behind which gates, and as which visitor
    Index call = 0,
          number = 0;  // of several calls: which one, and the family's number among those of all
  };

  [[nodiscard]] Index families() const {
    return (batches / family_batches) * (heads / family_heads);
  }
  // Visitors of each family.
  [[nodiscard]] Index turns() const {
    return groups * (members > 0 ? members : family_batches * family_heads);
  }

  // Head by head; within a head the last group, longest under a causal mask, first.
  [[nodiscard]] Visit visit(Index family, Index turn) const {
    const Index head_families = heads / family_heads;
    const Index member = first_member + turn / groups;
    return {family / head_families * family_batches + member / family_heads,
            family % head_families * family_heads + member % family_heads,
            first_group + groups - 1 - turn % groups,
            family,
            turn,
            0,
            family};
  }
};

// The families of one call, or of several calls whose workers they share.
class Families {
 public:
  Families(const VisitingOrder& order) { add(order); }
  Families() = default;

  // One call more; a visit to it counts `weight`.
  void add(const VisitingOrder& order, double weight = 1) {
    for (Index f = 0; f < order.families(); ++f) all_.push_back({calls_, f, order, weight});
    ++calls_;
  }
  [[nodiscard]] Index size() const { return Index(all_.size()); }
  [[nodiscard]] Index turns(Index number) const { return of(number).order.turns(); }
  [[nodiscard]] Index visits() const {
    Index count = 0;
    for (const Family& family : all_) count += family.order.turns();
    return count;
  }
  [[nodiscard]] double weight(Index number) const { return of(number).weight; }
  [[nodiscard]] VisitingOrder::Visit visit(Index number, Index turn) const {
    const Family& family = of(number);
    VisitingOrder::Visit visit = family.order.visit(family.index, turn);
    visit.call = family.call;
    visit.number = number;
    return visit;
  }

 private:
  struct Family {
    Index call, index;
    VisitingOrder order;
    double weight;
  };
  [[nodiscard]] const Family& of(Index number) const { return all_[std::size_t(number)]; }

  std::vector<Family> all_;  // [number]
  Index calls_ = 0;
};

// Hands out the visits of all families, each once, those of a family by turn. A worker stays with a family, so that
// the keys and values of few heads stand in cache at a time, and so that a worker that loses its processor delays
// nobody; only when no family is left does it help with that of another.
class Visits {
 public:
  explicit Visits(Families families)
      : families_(std::move(families)),
        next_turn_(new std::atomic<Index>[std::size_t(families_.size())] {}) {}

  // The next visit of a worker whose last one was to the family with this number, kNone before its first; nothing when all
  // are taken.
  static constexpr Index kNone = -1;
  [[nodiscard]] std::optional<VisitingOrder::Visit> next(Index& number) {
    if (number != kNone)
      if (const auto visit = take(number)) return visit;
    while ((number = next_family()) != kNone)
      if (const auto visit = take(number)) return visit;
    return {};
  }

 private:
  [[nodiscard]] std::optional<VisitingOrder::Visit> take(Index number) {
    const Index turn = next_turn_[std::size_t(number)].fetch_add(1, std::memory_order_relaxed);
    if (turn >= families_.turns(number)) return {};
    return families_.visit(number, turn);
  }
  // A family that nobody has begun, or else the one of which most is left; kNone when nothing is.
  [[nodiscard]] Index next_family() {
    const Index begun = begun_.fetch_add(1, std::memory_order_relaxed);
    if (begun < families_.size()) return begun;
    Index best = kNone;
    double most = 0;
    for (Index f = 0; f < families_.size(); ++f) {
      const Index turn = next_turn_[std::size_t(f)].load(std::memory_order_relaxed);
      const double left = double(families_.turns(f) - turn) * families_.weight(f);
      if (left <= most) continue;
      most = left;
      best = f;
    }
    return best;
  }

  Families families_;
  std::unique_ptr<std::atomic<Index>[]> next_turn_;  // of each family
  std::atomic<Index> begun_{0};                      // families
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
