// SPDX-License-Identifier: Apache-2.0
#pragma once

// What visitors add up, in an order that no number of threads changes: rows of gradients, tile by tile, and the gradients of
// parameters.

#include <heed/engine/visiting_order.hpp>
#include <heed/mask/mask.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The gates of tiles, for every family. What visitors add to the rows of a tile is two sums, each with a gate that they pass in their
// order, so that the next can add to one sum while this one adds to the other. Where more threads than families are at work, the
// rows of each sum are cut into strips with a gate each, for more visitors side by side; else strips would only cost time (a
// hundredth of backward, bench/NOTES.md).
//
// A visitor says first which tiles it adds to, and does not wait at the others: whoever passes a gate of these passes it for those
// that follow and add nothing there, and the visitor passes by itself the gates at which it is next. Both sides write before they
// read, in one order of all threads: one of the two sees the other.
class TileGates {
 public:
  using Visit = VisitingOrder::Visit;
  enum class Sum : int { keys, values };
  static constexpr Index kStrips = 4;

  // threads: that may be at work.
  TileGates(const VisitingOrder& order, Index tiles, Index tile_keys, Index threads)
      : tiles_(tiles),
        tile_keys_(tile_keys),
        strips_(threads > order.families() ? kStrips : 1),
        strip_keys_((tile_keys + strips_ * kStep - 1) / (strips_ * kStep) * kStep),
        turns_(order.turns()),
        gates_(order.families() * tiles * count()),
        spans_(new std::atomic<std::uint64_t>[std::size_t(order.families() * turns_)] {}) {}

  // The visitor adds to tiles [begin, end) of `span` alone.
  void begin(const Visit& visit, const KeyRange& span) {
    spans_[index_of(visit.family, visit.turn)].store(packed(span), std::memory_order_seq_cst);
    for (const KeyRange& absent : {KeyRange{0, span.begin}, KeyRange{span.end, tiles_}})
      for (Index tile = absent.begin; tile < absent.end; ++tile)
        for (Index g = 0; g < count(); ++g) pass_absent(visit.family, tile, g);
  }
  void wait(const Visit& visit, Index tile, Index gate) const {
    gates_.wait(place_of(visit.family, tile, gate), visit.turn);
  }
  void pass(const Visit& visit, Index tile, Index gate) {
    gates_.pass(place_of(visit.family, tile, gate));
    pass_absent(visit.family, tile, gate);
  }
  void abandon() { gates_.abandon(); }

  [[nodiscard]] Index strips() const { return strips_; }     // of a sum
  [[nodiscard]] Index count() const { return 2 * strips_; }  // gates of a tile
  [[nodiscard]] Index gate(Sum sum, Index strip) const { return Index(sum) * strips_ + strip; }
  // The keys of a strip of a tile, in the whole row; the last strips of a narrow tile have none.
  [[nodiscard]] KeyRange keys(Index tile, Index strip) const {
    const auto edge = [&](Index n) {
      return tile * tile_keys_ + std::min(n * strip_keys_, tile_keys_);
    };
    return {edge(strip), edge(strip + 1)};
  }

 private:
  static constexpr Index kStep = 12;  // keys: whole kernels of 4, 6 or 12 rows

  [[nodiscard]] Index place_of(Index family, Index tile, Index gate) const {
    return (family * tiles_ + tile) * count() + gate;
  }
  [[nodiscard]] std::size_t index_of(Index family, Index turn) const {
    return std::size_t(family * turns_ + turn);
  }
  // 0: the visitor has not begun.
  [[nodiscard]] static std::uint64_t packed(const KeyRange& span) {
    return std::uint64_t(span.begin + 1) << 32 | std::uint64_t(span.end + 1);
  }
  [[nodiscard]] bool is_absent(Index family, Index turn, Index tile) const {
    const std::uint64_t span = spans_[index_of(family, turn)].load(std::memory_order_seq_cst);
    return span != 0 && (tile + 1 < Index(span >> 32) || tile + 1 >= Index(span & 0xffffffff));
  }
  // Passes a gate for the visitors that are next there, and add nothing to the tile.
  void pass_absent(Index family, Index tile, Index gate) {
    const Index at = place_of(family, tile, gate);
    Index next = gates_.passed(at);
    while (next < turns_ && is_absent(family, next, tile))
      if (gates_.pass_for(at, next)) ++next;
  }

  Index tiles_, tile_keys_, strips_, strip_keys_, turns_;
  Turnstiles gates_;                                     // [family][tile][gate]
  std::unique_ptr<std::atomic<std::uint64_t>[]> spans_;  // [family][turn]
};

// One visitor's way past the gates of its tiles.
class Passage {
 public:
  using Sum = TileGates::Sum;
  explicit Passage(TileGates& gates) : gates_(gates) {}

  void begin(const VisitingOrder::Visit& visit, const KeyRange& tiles) {
    visit_ = visit;
    gates_.begin(visit, tiles);
  }
  void enter(Index tile) {
    tile_ = tile;
    passed_ = 0;
  }
  // Until those before have added to the sum, or to both.
  void wait(Sum sum) const {
    for (Index s = 0; s < gates_.strips(); ++s) gates_.wait(visit_, tile_, gates_.gate(sum, s));
  }
  void wait() const {
    wait(Sum::keys);
    wait(Sum::values);
  }
  // add(part) adds to the rows of some of `keys`, counted from the first of these: strip by strip, each in its turn. leaves: the
  // visitor adds nothing more to what it has added to.
  template <class Add>
  void add(Sum sum, const KeyRange& keys, bool leaves, Add&& add) {
    for (Index s = 0; s < gates_.strips(); ++s) {
      const KeyRange strip = gates_.keys(tile_, s);
      const KeyRange part{std::max(keys.begin, strip.begin) - keys.begin,
                          std::min(keys.end, strip.end) - keys.begin};
      if (part.size() == 0) continue;
      const Index gate = gates_.gate(sum, s);
      gates_.wait(visit_, tile_, gate);
      add(part);
      if (leaves) pass(gate);
    }
  }
  // Lets the next visitor in wherever this one has not yet.
  void leave() {
    for (Index gate = 0; gate < gates_.count(); ++gate)
      if ((passed_ >> gate & 1) == 0) {
        gates_.wait(visit_, tile_, gate);
        pass(gate);
      }
  }

 private:
  void pass(Index gate) {
    passed_ |= 1u << gate;
    gates_.pass(visit_, tile_, gate);
  }

  TileGates& gates_;
  VisitingOrder::Visit visit_{};
  Index tile_ = 0;
  unsigned passed_ = 0;  // gates of the tile, as bits
};

// Sums over all visitors in one order, whoever computes their terms: over the turns of a family, then over the
// families. A family that ends before an earlier one is kept beside the total, in one of `places`. The terms of a visitor that
// comes before its turn are kept, too; those of at most `early` in a family.
class OrderedSums {
 public:
  [[nodiscard]] static Index early_for(int workers) { return 2 * workers; }
  OrderedSums(const Families& families, Index places, Index early, Index numbers)
      : places_(places),
        early_(early),
        total_(std::size_t(numbers), 0.0),
        kept_(std::size_t(numbers * places), 0.0),
        ended_(std::size_t(families.size()), 0),
        lines_(new Line[std::size_t(families.size())]),
        turns_(families.size()),
        families_(1) {
    for (Index f = 0; f < families.size(); ++f)
      lines_[std::size_t(f)].last_turn = families.turns(f) - 1;
  }

  // add(sums) adds the visitor's terms. Where it adds to more than `sums`, it must come in turn: it waits until those before
  // it in the family have added theirs.
  template <class Add>
  void add(const VisitingOrder::Visit& visit, bool in_turn, Add&& add) {
    const Index number = visit.number;
    Line& line = lines_[std::size_t(number)];
    // The place is free when the family that had it is part of the total.
    if (visit.turn == 0) families_.wait(0, number - places_ + 1);
    turns_.wait(number, in_turn ? visit.turn : visit.turn - early_);
    std::vector<double> terms;
    const bool comes_early = turns_.passed(number) < visit.turn;
    if (comes_early) {
      terms.assign(total_.size(), 0.0);
      add(terms.data());
    }
    std::unique_lock lock(line.guard);
    if (comes_early) {
      line.waiting.emplace(visit.turn, std::move(terms));
    } else {
      add(sums_of(number));
      turns_.pass(number);
    }
    // Invariant: the family's sums hold the terms of the turns that have passed, and no other.
    while (!line.waiting.empty() && line.waiting.begin()->first == turns_.passed(number)) {
      add_to(sums_of(number), line.waiting.begin()->second.data());
      line.waiting.erase(line.waiting.begin());
      turns_.pass(number);
    }
    const bool ends = turns_.passed(number) == line.last_turn + 1;
    lock.unlock();
    if (ends) end(number);
  }
  // Is the visitor the last of its family? Then this returns when all the others have added their terms, too.
  [[nodiscard]] bool last_has_added(const VisitingOrder::Visit& visit) const {
    if (visit.turn != lines_[std::size_t(visit.number)].last_turn) return false;
    turns_.wait(visit.number, visit.turn + 1);
    return true;
  }
  [[nodiscard]] const std::vector<double>& total() const { return total_; }

  // For families that others have begun and others end, with a place for each: the sums of all, [family][numbers], empty where
  // nobody has begun.
  void go_on(const std::vector<double>& sums) {
    if (!sums.empty()) kept_ = sums;
    for (std::size_t f = 0; f < ended_.size(); ++f) lines_[f].last_turn = kNever;
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
  static constexpr Index kNever = -2;
  struct Line {
    Index last_turn = kNever;
    std::mutex guard;                              // of waiting and of the family's sums
    std::map<Index, std::vector<double>> waiting;  // [turn][numbers]
  };

  [[nodiscard]] double* sums_of(Index number) {
    return kept_.data() + std::size_t(number % places_) * total_.size();
  }
  void add_to(double* sums, const double* terms) const {
    for (std::size_t i = 0; i < total_.size(); ++i) sums[i] += terms[i];
  }
  // Invariant: the total holds the families before joined_, and no other.
  void end(Index number) {
    const std::lock_guard lock(guard_);
    ended_[std::size_t(number)] = 1;
    for (; joined_ < ended_.size() && ended_[joined_]; ++joined_) {
      double* sums = sums_of(Index(joined_));
      add_to(total_.data(), sums);
      std::fill_n(sums, total_.size(), 0.0);
      families_.pass(0);
    }
  }

  Index places_, early_;
  std::vector<double> total_, kept_;  // [numbers], [places][numbers]
  std::vector<char> ended_;           // [number]
  std::size_t joined_ = 0;            // families
  std::mutex guard_;                  // of ended_, joined_ and total_
  std::unique_ptr<Line[]> lines_;     // [number]
  Turnstiles turns_, families_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
