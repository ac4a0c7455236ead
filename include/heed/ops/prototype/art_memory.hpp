// SPDX-License-Identifier: Apache-2.0
#pragma once

// ART memory: prototypes W learned online, one row h at a time, beside the prototype attention.
//
//   choice_i = match_i (cosine)    h.W_i / ((|W_i| + eps) (|h| + eps)), L2 norms
//   choice_i (fuzzy)               |min(h,W_i)| / (choice_alpha + |W_i|), L1 norms
//   match_i (fuzzy)                |min(h,W_i)| / |h|
//   search                         prototypes by decreasing choice, the lowest index first among
//                                  equals; cosine looks at the first only, fuzzy goes on to the end
//   resonance  match >= vigilance  W_i += eta (min(h, W_i) - W_i)
//   created    none resonates      W_count = h, count += 1
//   full       none, no room left  nothing changes
//
// The first prototype of the search that passes is the one of largest choice among all that pass:
// one pass over the memory, no sorting, no scratch memory.
//
// Symbols  vigilance (rho), learning_rate (eta), choice_alpha (alpha of the choice function).
// Bounds   |h| = 0 under fuzzy: match 0. Finite rows of any size never make a NaN: under cosine,
//          rows whose squares could leave the range of Real are scaled by an exact power of two.
// Fuzzy    expects rows of non-negative values, best complement coded: [a, 1-a] with a in [0,1].
// Errors   std::invalid_argument; a refused call leaves the memory as it was.
// Accuracy sums over a row add whole vectors lane by lane, then the remaining numbers.
// Cost     count * dim multiply-adds per row (at most twice that under fuzzy), in vectors; learn() and
//          find() allocate nothing. Const calls may run at the same time.
// Source   GPT2-ART note, sections 1, 2.1 and 2.3; the fuzzy search, choice and complement coding
//          follow Carpenter, Grossberg and Rosen, "Fuzzy ART", Neural Networks 4 (1991).

#include <heed/core/functions.hpp>
#include <heed/core/view.hpp>
#include <heed/ops/prototype/art_types.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class ArtMemory {
  static_assert(std::is_floating_point_v<Real>, "ArtMemory holds float or double");

 public:
  explicit ArtMemory(const ArtOptions<Real>& options)
      : options_(detail::checked_art_options(options)) {
    constexpr Index most = std::numeric_limits<Index>::max() / Index(sizeof(Real)) / 2;
    const Index values = checked_product(capacity(), dim() + 2, "ArtMemory: capacity x (dim + 2)");
    require(values <= most - 2 * kLanes<Real>, "ArtMemory: capacity ", capacity(), " x dim ", dim(),
            " exceeds the address space");
    storage_.assign(std::size_t(values + 2 * (whole_vectors<Real>(capacity()) - capacity())),
                    Real(0));
  }

  // Copies only: a moved-from memory would have a count without prototypes.
  ArtMemory(const ArtMemory&) = default;
  ArtMemory& operator=(const ArtMemory&) = default;

  [[nodiscard]] const ArtOptions<Real>& options() const { return options_; }
  [[nodiscard]] Index capacity() const { return options_.capacity; }
  [[nodiscard]] Index dim() const { return options_.dim; }
  [[nodiscard]] Index count() const { return count_; }

  // Row-major (count, dim); valid until the memory is destroyed or assigned to.
  [[nodiscard]] std::span<const Real> prototypes() const {
    return {storage_.data(), std::size_t(count_ * dim())};
  }

  // Replaces all prototypes by `count` rows of a row-major (count, dim) span.
  void set_prototypes(std::span<const Real> rows, Index count) {
    require(count >= 0 && count <= capacity(), "ArtMemory::set_prototypes: count ", count,
            " is outside [0, ", capacity(), "], the capacity");
    require(Index(rows.size()) == count * dim(), "ArtMemory::set_prototypes: ", rows.size(),
            " values were given, ", count, " prototypes of dim ", dim(), " need ", count * dim());
    for (Index i = 0; i < count; ++i)
      require_values(rows.data() + i * dim(), "ArtMemory::set_prototypes", "prototype ", i);
    std::copy(rows.begin(), rows.end(), storage_.begin());
    count_ = count;
    for (Index i = 0; i < count; ++i) remeasure(i);
  }

  void reset() { count_ = 0; }

  // Learns one row of dim values.
  ArtEvent<Real> learn(std::span<const Real> row) {
    require_row(row, "ArtMemory::learn");
    return learn_checked(row.data());
  }

  // Learns the rows (batch, token) of one head, in this order. All rows are checked before any is
  // learned. `events` receives one event per row, at batch * len + token, or is empty.
  ArtTally learn(const TensorView<const Real>& rows, Index head,
                 std::span<ArtEvent<Real>> events = {}) {
    require_view(rows, head, Index(events.size()));
    ArtTally tally;
    if (!rows.has_elements()) return tally;
    const auto [batch, heads, len, width] = rows.shape();
    for (Index b = 0; b < batch; ++b)
      for (Index t = 0; t < len; ++t) {
        const ArtEvent<Real> event = learn_checked(rows.row(b, head, t));
        if (!events.empty()) events[std::size_t(b * len + t)] = event;
        tally.resonance += event.outcome == ArtOutcome::resonance;
        tally.created += event.outcome == ArtOutcome::created;
        tally.full += event.outcome == ArtOutcome::full;
      }
    return tally;
  }

  // The prototype that learn(row) would move, without moving it.
  [[nodiscard]] ArtFound<Real> find(std::span<const Real> row) const {
    require_row(row, "ArtMemory::find");
    return search(row.data()).found;
  }

  // The prototype of largest cosine or choice.
  [[nodiscard]] ArtWinner<Real> winner(std::span<const Real> row) const {
    require_row(row, "ArtMemory::winner");
    return search(row.data()).winner;
  }

  // [a, 1 - a]: 2 * row.size() values with |h| = row.size(). Throws for a value outside [0,1].
  [[nodiscard]] static std::vector<Real> complement_code(std::span<const Real> row) {
    for (std::size_t c = 0; c < row.size(); ++c)
      require(row[c] >= 0 && row[c] <= 1, "ArtMemory::complement_code: value ", c, " is ", row[c],
              "; it must lie in [0, 1]");
    std::vector<Real> code(row.begin(), row.end());
    code.reserve(2 * row.size());
    for (const Real a : row) code.push_back(1 - a);
    return code;
  }

 private:
  // L2 norm (cosine) or L1 norm (fuzzy) of scale * row; scale is an exact power of two, mostly 1.
  struct Measure {
    Real scale, norm;
  };
  struct Affinities {
    Pack<Real> choices, matches;
  };
  struct Search {
    ArtWinner<Real> winner;
    ArtFound<Real> found;
  };

  void require_row(std::span<const Real> row, const char* function) const {
    require(Index(row.size()) == dim(), function, ": the row has ", row.size(),
            " values, the memory has dim ", dim());
    require_values(row.data(), function, "the row");
  }

  void require_view(const TensorView<const Real>& rows, Index head, Index events) const {
    const auto [batch, heads, len, width] = rows.shape();
    require(batch >= 0 && heads >= 0 && len >= 0, "ArtMemory::learn: rows have the shape ",
            rows.shape(), "; no extent may be negative");
    require(width == dim(), "ArtMemory::learn: rows have dim ", width, ", the memory has ", dim());
    require(head >= 0 && head < heads, "ArtMemory::learn: head ", head, " is outside [0, ", heads,
            "), the heads of the rows");
    const Index tokens = checked_product(batch, len, "ArtMemory::learn: batch x len");
    require(events == 0 || events == tokens, "ArtMemory::learn: events has ", events,
            " entries, there are ", tokens, " rows");
    require(rows.page_rows() > 0 || rows.data() != nullptr || tokens == 0,
            "ArtMemory::learn: rows of shape ", rows.shape(), " have a null pointer");
    for (Index b = 0; b < batch; ++b)
      for (Index t = 0; t < len; ++t)
        require_values(rows.row(b, head, t), "ArtMemory::learn", "token ", t, " of batch ", b);
  }

  template <class... Where>
  void require_values(const Real* row, const char* function, const Where&... where) const {
    const bool fuzzy = options_.matching == ArtMatching::fuzzy;
    // x * 0 is 0 for a finite x and NaN otherwise.
    if (!fuzzy && sum([row](auto at) { return at(row) * Real(0); }) == Real(0)) return;
    Real total = 0;
    for (Index c = 0; c < dim(); ++c) {
      require(std::isfinite(row[c]), function, ": value ", c, " of ", where..., " is ", row[c],
              "; it must be finite");
      require(!fuzzy || row[c] >= 0, function, ": value ", c, " of ", where..., " is ", row[c],
              "; fuzzy matching needs values of at least 0");
      if (fuzzy) total += row[c];
    }
    require(std::isfinite(total), function, ": the values of ", where..., " add up to ", total,
            "; fuzzy matching needs a finite sum");
  }

  ArtEvent<Real> learn_checked(const Real* row) {
    const ArtFound<Real> found = search(row).found;
    if (found.index >= 0) {
      adapt(found.index, row);
      return {found.index, ArtOutcome::resonance, found.match, found.searched};
    }
    if (count_ == capacity()) return {-1, ArtOutcome::full, found.match, found.searched};
    const Index created = count_;
    std::copy(row, row + dim(), prototype(created));
    remeasure(created);
    ++count_;
    return {created, ArtOutcome::created, found.match, found.searched};
  }

  // Under cosine choice = match: the best prototype passes, or none does.
  [[nodiscard]] Search search(const Real* row) const {
    const Measure measured = measure(row);
    ArtWinner<Real> first, resonant;
    for_each_affinity(row, measured, [&](Index i, Real choice, Real match) {
      if (first.index < 0 || choice > first.choice) first = {i, choice, match};
      if (match >= options_.vigilance && (resonant.index < 0 || choice > resonant.choice))
        resonant = {i, choice, match};
    });
    const bool found = resonant.index >= 0;
    return {first,
            {resonant.index, found ? resonant.match : first.match,
             searched(row, measured, first, resonant)}};
  }

  // The number of candidates up to and including the resonant one: prototypes with a larger choice
  // come before it, or with an equal one and a lower index.
  [[nodiscard]] Index searched(const Real* row, const Measure& measured,
                               const ArtWinner<Real>& first,
                               const ArtWinner<Real>& resonant) const {
    if (count_ == 0) return 0;
    if (options_.matching == ArtMatching::cosine || resonant.index == first.index) return 1;
    if (resonant.index < 0) return count_;
    Index ahead = 0;
    for_each_affinity(row, measured, [&](Index i, Real choice, Real) {
      ahead += choice > resonant.choice || (choice == resonant.choice && i < resonant.index);
    });
    return ahead + 1;
  }

  // Calls f(i, choice, match) for each prototype in turn. A vector's lanes hold as many prototypes at once.
  template <class F>
  void for_each_affinity(const Real* row, const Measure& measured, F&& f) const {
    constexpr Index W = kLanes<Real>;
    for (Index first = 0; first < count_; first += W) {
      const Index count = std::min(W, count_ - first);
      const auto [choices, matches] = affinities(row, measured, first, count);
      for (Index k = 0; k < count; ++k) f(first + k, choices.lane(int(k)), matches.lane(int(k)));
    }
  }
  // Choices and matches of the prototypes [first, first + count), one per lane.
  [[nodiscard]] Affinities affinities(const Real* row, const Measure& measured, Index first,
                                      Index count) const {
    const Pack<Real> scale = Pack<Real>::load(scales() + first);
    const Pack<Real> norm = Pack<Real>::load(norms() + first);
    if (options_.matching == ArtMatching::fuzzy) {
      const Pack<Real> both = sums(count, [&](Index k, auto at) {
        return math::minimum(at(row), at(prototype(first + k)));
      });
      return {both / (options_.choice_alpha + norm),
              measured.norm > 0 ? both / measured.norm : Pack<Real>(Real(0))};
    }
    const Pack<Real> dot = sums(count, [&](Index k, auto at) {
      return (at(prototype(first + k)) * scales()[first + k]) * (at(row) * measured.scale);
    });
    // Divides twice: the product of two small denominators could be 0.
    const Pack<Real> cosine =
        dot / (norm + options_.eps * scale) / (measured.norm + options_.eps * measured.scale);
    return {cosine, cosine};
  }

  void adapt(Index i, const Real* row) {
    Real* w = prototype(i);
    const Real eta = options_.learning_rate;
    for_each_vector([&](auto at, auto put) {
      const auto old = at(w), target = math::minimum(at(row), old);
      const auto step = target - old;  // -inf for opposite values near the largest Real
      const auto small_steps = (1 - eta) * old + eta * target;
      put(w,
          math::select(step < std::numeric_limits<Real>::lowest(), small_steps, old + eta * step));
    });
    remeasure(i);
  }

  [[nodiscard]] Measure measure(const Real* row) const {
    if (options_.matching == ArtMatching::fuzzy)
      return {Real(1), sum([row](auto at) { return at(row); })};
    const Real scale = safe_scale(row);
    return {scale, std::sqrt(sum([=](auto at) { return (at(row) * scale) * (at(row) * scale); }))};
  }

  // 1 where sums of up to 2^28 squares stay in range (float: largest value in [2^-50, 2^50)), else
  // the power of two that brings the largest value close to 1.
  [[nodiscard]] Real safe_scale(const Real* row) const {
    constexpr int safe = std::numeric_limits<Real>::max_exponent / 2 - 14;
    constexpr int most = std::numeric_limits<Real>::max_exponent - 2;  // 2^-most is a normal number
    Pack<Real> lanes = Real(0);
    Real largest = 0;
    for_each_vector([&](auto at, auto) { widen(lanes, largest, math::absolute(at(row))); });
    for (int i = 0; i < kLanes<Real>; ++i) largest = std::max(largest, lanes.lane(i));
    if (largest == 0) return Real(1);
    const int exponent = std::ilogb(largest);
    if (exponent >= -safe && exponent < safe) return Real(1);
    return std::ldexp(Real(1), std::clamp(-exponent, -most, most));
  }

  // Calls step(at, put) for the values of a row from left to right: at(x) reads them of row x, a vector or one number,
  // and put(x, value) writes them.
  template <class Step>
  void for_each_vector(const Step& step) const {
    Index c = 0;
    for (; c + kLanes<Real> <= dim(); c += kLanes<Real>)
      step([c](const Real* x) { return Pack<Real>::load(x + c); },
           [c](Real* x, Pack<Real> value) { value.store(x + c); });
    for (; c < dim(); ++c)
      step([c](const Real* x) { return x[c]; }, [c](Real* x, Real value) { x[c] = value; });
  }
  // The sum of term(at) over a row.
  template <class Term>
  [[nodiscard]] Real sum(const Term& term) const {
    Pack<Real> lanes = Real(0);
    Real rest = 0;
    add_terms(lanes, rest, term);
    return sum_lanes(lanes) + rest;
  }
  // Lane k of the result is the sum of term(k, at) over a row, for k < count; 0 behind.
  template <class Term>
  [[nodiscard]] Pack<Real> sums(Index count, const Term& term) const {
    Pack<Real> lanes[std::size_t(kLanes<Real>)];
    Real rest[std::size_t(kLanes<Real>)] = {};
    std::fill(std::begin(lanes), std::end(lanes), Pack<Real>(Real(0)));
    for (Index k = 0; k < count; ++k)
      add_terms(lanes[k], rest[k], [&](auto at) { return term(k, at); });
    return detail::sums_of_lanes<Real>(lanes) + Pack<Real>::load(rest);
  }
  template <class Term>
  void add_terms(Pack<Real>& lanes, Real& rest, const Term& term) const {
    for_each_vector([&](auto at, auto) { add(lanes, rest, term(at)); });
  }
  static void add(Pack<Real>& lanes, Real&, Pack<Real> x) { lanes += x; }
  static void add(Pack<Real>&, Real& rest, Real x) { rest += x; }
  static void widen(Pack<Real>& lanes, Real&, Pack<Real> x) { lanes = math::maximum(lanes, x); }
  static void widen(Pack<Real>&, Real& largest, Real x) { largest = std::max(largest, x); }

  // Storage: (capacity, dim) prototypes, then their scales and then their norms, each in whole vectors.
  [[nodiscard]] Real* prototype(Index i) { return storage_.data() + i * dim(); }
  [[nodiscard]] const Real* prototype(Index i) const { return storage_.data() + i * dim(); }
  [[nodiscard]] const Real* scales() const { return storage_.data() + capacity() * dim(); }
  [[nodiscard]] const Real* norms() const { return scales() + whole_vectors<Real>(capacity()); }
  void remeasure(Index i) {
    const auto [scale, norm] = measure(prototype(i));
    Real* scales = storage_.data() + capacity() * dim();
    scales[i] = scale;
    scales[whole_vectors<Real>(capacity()) + i] = norm;
  }

  std::vector<Real> storage_;
  ArtOptions<Real> options_;
  Index count_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
