// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a backward call share: the accumulators, and the order in which they are added to.

#include <heed/core/parallel.hpp>
#include <heed/engine/derived_queries.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
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
    Index family, turn;        // behind which turnstiles, and as which visitor
    Index call = 0,
          number = 0;  // of several calls: which one, and the family's number among those of all
    [[nodiscard]] Index gate(Index tile, Index tiles) const { return family * tiles + tile; }
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

// Sums over all visitors in one order, whoever computes their terms: over the turns of a family, then over the
// families. A family that ends before an earlier one is kept beside the total, in one of `places`.
class OrderedSums {
 public:
  OrderedSums(const Families& families, Index places, Index numbers)
      : places_(places),
        total_(std::size_t(numbers), 0.0),
        kept_(std::size_t(numbers * places), 0.0),
        ended_(std::size_t(families.size()), 0),
        turns_(families.size()),
        families_(1) {
    for (Index f = 0; f < families.size(); ++f) last_turn_.push_back(families.turns(f) - 1);
  }

  // add(sums) adds the visitor's terms; no other visitor of its family does so meanwhile.
  template <class Add>
  void add(const VisitingOrder::Visit& visit, Add&& add) {
    // The place is free when the family that had it is part of the total.
    if (visit.turn == 0) families_.wait(0, visit.number - places_ + 1);
    turns_.wait(visit.number, visit.turn);
    add(sums_of(visit.number));
    turns_.pass(visit.number);
    if (visit.turn == last_turn_[std::size_t(visit.number)]) end(visit.number);
  }
  [[nodiscard]] const std::vector<double>& total() const { return total_; }

  // For families that others have begun and others end, with a place for each: the sums of all, [family][numbers], empty where
  // nobody has begun.
  void go_on(const std::vector<double>& sums) {
    if (!sums.empty()) kept_ = sums;
    for (Index& last : last_turn_) last = -1;
  }
  [[nodiscard]] const std::vector<double>& kept() const { return kept_; }
  // The total of kept(), family by family, as end() adds it up.
  [[nodiscard]] std::vector<double> total_of_kept() const {
    std::vector<double> total(total_.size(), 0.0);
    for (std::size_t f = 0; f < ended_.size(); ++f)
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += kept_[f * total.size() + i];
    return total;
  }

  void abandon() {
    turns_.abandon();
    families_.abandon();
  }

 private:
  [[nodiscard]] double* sums_of(Index number) {
    return kept_.data() + std::size_t(number % places_) * total_.size();
  }
  // Invariant: the total holds the families before joined_, and no other.
  void end(Index number) {
    const std::lock_guard lock(guard_);
    ended_[std::size_t(number)] = 1;
    for (; joined_ < ended_.size() && ended_[joined_]; ++joined_) {
      double* sums = sums_of(Index(joined_));
      for (std::size_t i = 0; i < total_.size(); ++i) total_[i] += sums[i];
      std::fill_n(sums, total_.size(), 0.0);
      families_.pass(0);
    }
  }

  Index places_;
  std::vector<Index> last_turn_;      // [number]
  std::vector<double> total_, kept_;  // [numbers], [places][numbers]
  std::vector<char> ended_;           // [number]
  std::size_t joined_ = 0;            // families
  std::mutex guard_;                  // of ended_, joined_ and total_
  Turnstiles turns_, families_;
};

// Heads that share rows: where they read one key-value head, or where one row of bias or of query serves them all. Where a
// head may read any key-value head, all count as readers of one.
struct FamilySize {
  Index batches, heads;
};
template <class Real>
[[nodiscard]] FamilySize family_of(const OpTiles<Real>& op, const Geometry& g,
                                   const Shape& bias_shape, bool bias) {
  const bool all_heads =
      (bias && bias_shape.heads == 1) || !reads_keys_by_group(op, g) ||
      readers_of_queries(op, g, op.readout.traits.uses_query) == QueryReaders::several_heads;
  const Index one = 1;  // a call without batches or heads has no family at all
  return {std::max(one, bias && bias_shape.batch == 1 ? g.batch : one),
          std::max(one, all_heads ? g.heads : g.group())};
}

// What all workers of a backward call read and add to.
template <class Real>
struct BackwardShared : DerivedSums<Real> {
  const OpVjps<Real>& vjps;
  const Saved<Real>& saved;
  OutputGradientOperands<Real> output;
  GradientOperands<Real> grads;
  VisitingOrder order;
  bool sums_queries;           // is the gradient of query a sum over heads or maps?
  Turnstiles tiles;            // [family][tile]
  DerivedSums<Real> tangents;  // where they move
  // Gradients of what normaliser and readout read of tokens, [batch][head][query or key][inputs].
  std::vector<Real> dnormaliser_query, dnormaliser_key, dreadout_query;

  BackwardShared(const CallContext<Real>& c, const OpVjps<Real>& of_op,
                 const Saved<Real>& of_forward, const OutputGradientOperands<Real>& of_output,
                 const GradientOperands<Real>& to, int planes = 1)
      : vjps(of_op),
        saved(of_forward),
        output(of_output),
        grads(to),
        order(visiting_order(c, to.bias.given())),
        sums_queries(readers_of_queries(c.op, c.geometry, c.op.readout.traits.uses_query) !=
                     QueryReaders::one),
        tiles(order.families() * c.plan.tiles) {
    const DerivedNeeds<Real>& needs = c.keys.needs();
    const ScoreTraits& score = c.op.score.traits;
    const TokenColumns& columns = c.op.columns;
    const Geometry& g = c.geometry;
    const auto zeros = [](auto& numbers, Index count) { numbers.assign(std::size_t(count), 0); };
    for (int n = 0; n < planes; ++n) {
      zeros(sums(n).dfeatures, c.keys.row_count() * score.key_features);
      zeros(sums(n).drows, c.keys.row_count() * needs.row_numbers());
      zeros(sums(n).dquery_inputs, g.query_rows() * score.query_inputs);
      zeros(sums(n).dkey_inputs, c.keys.row_count() * score.key_inputs);
    }
    zeros(dnormaliser_query, g.query_rows() * columns.normaliser_query.count);
    zeros(dnormaliser_key, g.batch * g.heads * g.len_kv * columns.normaliser_key.count);
    zeros(dreadout_query, g.query_rows() * columns.readout_query.count);
    parameters_ = OpGradient<Real>(of_op).numbers();
    tables_ = c.geometry.heads * needs.table_rows * c.geometry.dim_qk;
  }

  // The sums of derived values' gradients, or their tangents.
  [[nodiscard]] DerivedSums<Real>& sums(int plane) { return plane > 0 ? tangents : *this; }
  // How many numbers OrderedSums adds up: all parameters, as visit() meets them, then tables
  // [head][table_rows][dim_qk].
  [[nodiscard]] Index numbers() const { return parameters_ + tables_; }
  // Where the gradients of the tables begin among them.
  [[nodiscard]] Index first_table() const { return parameters_; }
  [[nodiscard]] static Index places_for(int workers, Index families) {
    return std::clamp<Index>(2 * workers, 1, std::max<Index>(1, families));
  }
  // Places of OrderedSums: as many again as are at work, for families that end before an earlier one.
  [[nodiscard]] Index places(int workers) const { return places_for(workers, order.families()); }

  // Memory of a call with so many workers.
  [[nodiscard]] Index bytes(int workers) const {
    std::size_t count = 0;
    for (const auto* numbers :
         {&this->dfeatures, &this->drows, &this->dquery_inputs, &this->dkey_inputs,
          &dnormaliser_query, &dnormaliser_key, &dreadout_query})
      count += numbers->size();
    return Index(count * sizeof(Real)) + (1 + places(workers)) * numbers() * Index(sizeof(double));
  }

  // Where the gradients of keys, or their tangents, are added up that map `map` of the head of `at` reads, from the first key of
  // `at` on: rows of `stride` numbers. Not given where nobody asks for them.
  struct KeyRows {
    Real* data = nullptr;
    Index stride = 0;
  };
  [[nodiscard]] KeyRows key_rows(const CallContext<Real>& c, const TilePlace& at, int map,
                                 const Source& source, int plane = 0) {
    if (c.op.score.traits.has_transform) {
      const Index numbers = c.keys.needs().row_numbers();
      return {sums(plane).drows.data() + c.keys.row(at.batch, at.head, map, at.key) * numbers,
              numbers};
    }
    if (!grads.key.given()) return {};
    return {grads.key.row(at.batch, source.kv_head, at.key) + source.key_column,
            grads.key.strides().row};
  }

  // Adds the sums of all visits to the gradients of the parameters.
  void add_parameter_gradients(const CallContext<Real>& c, const std::vector<double>& sums,
                               OpGradient<Real>& to) const {
    to.add_from(sums.data());
    if (!c.op.score.traits.has_table) return;
    const Index width = c.geometry.dim_qk, size = c.keys.needs().table_rows * width;
    for (Index h = 0; h < c.geometry.heads; ++h)
      vjps.score.table_vjp(h, width, sums.data() + first_table() + h * size, *to.score);
  }

 private:
  [[nodiscard]] static VisitingOrder visiting_order(const CallContext<Real>& c, bool bias) {
    const Geometry& g = c.geometry;
    const FamilySize family = family_of(c.op, g, c.mask.bias().shape(), bias);
    // Groups of a head at hand.
    const Index queries = c.plan.group * c.plan.lanes, begin = g.share.queries_before / queries;
    const Index end = g.held_queries() > 0 ? (g.held_queries_end() + queries - 1) / queries : begin;
    return {g.batch, g.heads, end - begin, family.batches, family.heads, begin};
  }

  Index parameters_ = 0, tables_ = 0;  // numbers in them
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
