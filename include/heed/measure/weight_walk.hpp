// SPDX-License-Identifier: Apache-2.0
#pragma once

// The walk behind measure_weights() (measure/weights.hpp): panels of queries over tiles of keys, as in forward.
//
//   streaming normaliser   per tile: scores -> weights, by the states that forward saved; then the tile is measured
//   row normaliser         all tiles: scores; once: scores -> weights; part by part the row is measured
//
// Parallel over the panels of all heads. A panel is measured the same way by whichever thread takes it, and no number is
// added up across panels.
//
// Memory  per worker as in forward; the results take O(len_q (links + key sets)).

#include <heed/core/parallel.hpp>
#include <heed/engine/queries.hpp>
#include <heed/measure/weight_measures.hpp>
#include <heed/simd/functions.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// A KeySet, checked; the ranges of each list are in order and apart.
class OrderedKeys {
 public:
  // `where` and `n`, the number of the set, stand in errors.
  OrderedKeys(const KeySet& set, const Geometry& g, const std::string& where, std::size_t n)
      : lists_(set.ranges), g_(g) {
    const Index lists = Index(lists_.size());
    require(lists == 1 || lists == g.batch || lists == g.batch * g.len_q, where, ": sets[", n,
            "] has ", lists, " lists of ranges, it must have 1, one per sequence (", g.batch,
            ") or one per query (", g.batch * g.len_q, ")");
    per_query_ = lists == g.batch * g.len_q && lists != 1 && lists != g.batch;
    per_sequence_ = lists == g.batch && lists != 1;
    for (auto& list : lists_) {
      for (const KeyRange& keys : list)
        require(keys.begin >= 0 && keys.begin <= keys.end && keys.end <= g.len_kv, where, ": sets[",
                n, "] has a range [", keys.begin, ", ", keys.end, "), it must lie in [0, ",
                g.len_kv, "] and not end before it begins");
      std::sort(list.begin(), list.end(),
                [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; });
      Index seen = 0;
      for (KeyRange& keys : list) {
        keys.begin = std::max(keys.begin, std::min(seen, keys.end));
        seen = std::max(seen, keys.end);
      }
    }
  }

  [[nodiscard]] bool per_query() const { return per_query_; }
  // The ranges of query i of sequence b.
  [[nodiscard]] const std::vector<KeyRange>& of(Index b, Index i) const {
    return lists_[std::size_t(per_query_ ? b * g_.len_q + i : per_sequence_ ? b : 0)];
  }

 private:
  std::vector<std::vector<KeyRange>> lists_;
  Geometry g_;
  bool per_query_ = false, per_sequence_ = false;
};

// Sums over the keys of a panel's rows so far, a number per lane. Sums of up to kBlock keys are
// Reals, sums of these are doubles.
template <class Real>
class RowSums {
 public:
  static constexpr Index kBlock = 64;
  using P = Pack<Real>;

  RowSums(Index lanes, std::size_t sets)
      : total(std::size_t(lanes)), size(total), logs(total), reach(total) {
    mass.assign(sets, total);
    share.assign(sets, total);
  }
  void clear() {
    for (auto* sums : {&total, &size, &logs, &reach}) std::fill(sums->begin(), sums->end(), 0.0);
    for (auto* sets : {&mass, &share})
      for (auto& sums : *sets) std::fill(sums.begin(), sums.end(), 0.0);
  }
  static void add(std::vector<double>& sums, int v, P terms) {
    for (int lane = 0; lane < kLanes<Real>; ++lane)
      sums[std::size_t(v * kLanes<Real> + lane)] += double(terms.lane(lane));
  }

  std::vector<double> total, size;               // sums of w, of |w|
  std::vector<double> logs, reach;               // sums of |w| log |w|, of |w| |p - j|
  std::vector<std::vector<double>> mass, share;  // [set], sums of w, of |w|
};

template <class Real>
class WeightWorker {
 public:
  using Context = CallContext<Real>;

  // saved: the result of forward() for a streaming normaliser; row normalisers need none.
  WeightWorker(const Context& c, const Saved<Real>* saved, const std::vector<OrderedKeys>& sets,
               WeightMeasures& to, Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        bf16_(c.pair_products, c.geometry, c.plan.tile, c.plan.lanes, traits_.maps, false, scratch),
        c_(c),
        saved_(saved),
        sets_(sets),
        to_(to),
        panel_(c_, scratch, false),
        sums_(c.plan.lanes, sets.size()),
        nan_(std::size_t(c.plan.lanes)) {
    if (c.pair_products) c_.bf16 = &bf16_;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    states_ = take_lanes(scratch, traits_.state_numbers, lanes);
    work_states_ = take_lanes(scratch, traits_.state_numbers, lanes);
    const Index own = traits_.streams ? tile : 0;  // a row normaliser's scores stand in its panel
    scores_ = take_lanes(scratch, own, lanes);
    projected_ = take_lanes(scratch, tile, lanes);
    top_ = scratch.take(lanes);
    factors_ = scratch.take(lanes);
    least_ = scratch.take(lanes);
  }
  WeightWorker(const WeightWorker&) = delete;  // the panel refers to the context

  void run(Index b, Index h, Index panel) {
    panel_.move_to(b, h, panel);
    panel_.load_queries();
    sums_.clear();
    std::fill(nan_.begin(), nan_.end(), false);
    std::fill(least_, least_ + c_.plan.lanes, Real(0));
    if (traits_.streams)
      measure_streaming();
    else
      measure_rows();
    for (Index i = 0; i < panel_.place.rows; ++i) write(i);
  }

 private:
  using P = Pack<Real>;
  static constexpr Index kWidth = kLanes<Real>;

  [[nodiscard]] KeyRange tile_keys(Index t) const {
    return {t * c_.plan.tile, std::min((t + 1) * c_.plan.tile, c_.geometry.len_kv)};
  }

  // Invariant, behind each tile: sums_ and the links of the rows cover all keys so far.
  void measure_streaming() {
    const NormaliserTiles<Real>& normaliser = c_.op.normaliser;
    panel_.load_states(states_, saved_);
    normaliser.finish(states_, c_.plan.vectors, factors_, panel_.lse.row(0));
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      const PanelTile tile = panel_.tile(tile_keys(t));
      if (tile.kind == TileKind::empty) continue;
      const TilePlace& at = tile.at;
      const LaneTile<Real> scores = scores_.part(0, at.keys);
      std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
      panel_.query[0].tile_scores(at, tile.kind, scores, projected_, top_);
      weigh(scores, at);
      fill_skipped(at, c_.plan.vectors, scores, Real(0));
      note(scores, at.key);
    }
    // Finds the rows whose sum forward found to be NaN, for example because all visible scores are -infinity.
    for (std::size_t i = 0; i < nan_.size(); ++i) nan_[i] = std::isnan(factors_[i]);
  }
  // Scores of a tile become weights. The normaliser adds their sums to a copy of the states.
  void weigh(const LaneTile<Real>& scores, const TilePlace& at) const {
    std::copy_n(states_.data, states_.rows * states_.lanes, work_states_.data);
    c_.op.normaliser.weigh(scores, at, c_.plan.vectors, work_states_);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const P factor = P::load(factors_ + v * kWidth);
      const KeyRange keys = at.keys_of(v);
      for (Index j = keys.begin; j < keys.end; ++j) {
        const P weight = scores.load(j, v);
        scores.store(j, v, zero_where(weight == P(Real(0)), weight * factor));
      }
    }
  }

  void measure_rows() {
    RowBlock<Real> block = panel_.row_block();
    const Index first = panel_.seen_by_any.begin;
    const auto part = [&](int m, Index key, Index keys) {
      return block.scores[std::size_t(m)].part(key - first, keys);
    };
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      const PanelTile tile = panel_.tile(tile_keys(t));
      const TilePlace& at = tile.at;
      for (int m = 0; m < traits_.maps; ++m) {
        const LaneTile<Real> scores = part(m, at.key, at.keys);
        if (tile.kind == TileKind::empty)
          scores.fill(-kInfinity<Real>);
        else
          panel_.query[std::size_t(m)].tile_scores(at, tile.kind, scores, projected_,
                                                   panel_.rows.max[std::size_t(m)]);
      }
    }
    if (traits_.uses_extra || traits_.uses_query) {
      const ReadoutPanel<Real> own = panel_.readout.load(panel_.place, {});
      block.extra = own.extra.data;
      block.query = own.query;
    }
    for (Index i = 0; i < panel_.place.rows; ++i) nan_[std::size_t(i)] = panel_.is_nan_row(i);
    c_.op.normaliser.weights(block);
    for (Index j = 0; j < block.keys(); j += c_.plan.tile) {
      const Index keys = std::min(c_.plan.tile, block.keys() - j);
      note(block.scores[0].part(j, keys), first + j);
    }
  }

  // Adds the weights of keys first, first + 1, ... to the sums, and links them.
  void note(const LaneTile<Real>& weights, Index first) {
    for (int v = 0; v * kWidth < panel_.place.rows; ++v)
      for (Index j = 0; j < weights.rows; j += RowSums<Real>::kBlock)
        note_block(weights, v, first, {j, std::min(j + RowSums<Real>::kBlock, weights.rows)});
    for (std::size_t s = 0; s < sets_.size(); ++s)
      if (sets_[s].per_query())
        for (Index i = 0; i < panel_.place.rows; ++i) note_query_mass(weights, first, s, i);
      else
        note_mass(weights, first, s);
  }
  void note_block(const LaneTile<Real>& weights, int v, Index first, const KeyRange& keys) {
    const Index from = v * kWidth;
    const P zero = Real(0);
    // Distance of key `first` from each query; distances are exact up to 2^24 tokens in float.
    const P origin =
        P::iota() + Real(c_.geometry.query_position(panel_.place.query + from) - first);
    P total = zero, size = zero, logs = zero, reach = zero, top = zero;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const P w = weights.load(j, v), a = math::absolute(w);
      total += w;
      size += a;
      // Not math::log(), which looks at 0 lane by lane: a is 0 or of ordinary size, or too small to count.
      const Scientific<Real> parts(a);
      logs += a * log_of(parts.exponent, parts.mantissa - Real(1));
      reach += a * math::absolute(origin - Real(j));
      top = max(a, top);
    }
    RowSums<Real>::add(sums_.total, v, total);
    RowSums<Real>::add(sums_.size, v, size);
    RowSums<Real>::add(sums_.logs, v, logs);
    RowSums<Real>::add(sums_.reach, v, reach);
    if (any_lane(top > P::load(least_ + from))) link_block(weights, v, first, keys);
  }
  // Links the keys of a block. Few blocks of a long row have any links.
  [[gnu::noinline]] void link_block(const LaneTile<Real>& weights, int v, Index first,
                                    const KeyRange& keys) {
    for (Index j = keys.begin; j < keys.end; ++j) {
      const P w = weights.load(j, v);
      if (any_lane(math::absolute(w) > P::load(least_ + v * kWidth))) link(v, first + j, w);
    }
  }

  // Puts key `key` among the links of the queries of vector v that give it more than their last link has. Keys arrive in
  // their order, so that among equal weights the earlier key stays in front.
  void link(int v, Index key, P weights) {
    for (Index lane = 0; lane < kWidth; ++lane) {
      const Index i = v * kWidth + lane;
      if (i >= panel_.place.rows) return;
      const double weight = double(weights.lane(int(lane)));
      if (!(std::abs(weight) > double(least_[i]))) continue;
      WeightLink* links = to_.links.data() + (panel_.first_row() + i) * to_.links_per_row;
      Index at = to_.links_per_row - 1;
      for (; at > 0 && std::abs(links[at - 1].weight) < std::abs(weight); --at)
        links[at] = links[at - 1];
      links[at] = {key, weight};
      least_[i] = Real(std::abs(links[to_.links_per_row - 1].weight));
    }
  }

  // Calls body(keys) for the parts of a tile, counted from its first key, that the ranges cover, kBlock keys at a time.
  template <class Body>
  static void for_covered(const std::vector<KeyRange>& ranges, Index first, Index count,
                          Body&& body) {
    for (const KeyRange& range : ranges) {
      const Index end = std::clamp<Index>(range.end - first, 0, count);
      for (Index j = std::clamp<Index>(range.begin - first, 0, count); j < end;
           j += RowSums<Real>::kBlock)
        body(KeyRange{j, std::min(j + RowSums<Real>::kBlock, end)});
    }
  }
  // Adds to the sums of a set whose keys are the same for all queries of the panel.
  void note_mass(const LaneTile<Real>& weights, Index first, std::size_t set) {
    const auto& ranges = sets_[set].of(panel_.place.batch, panel_.place.query);
    for_covered(ranges, first, weights.rows, [&](const KeyRange& keys) {
      for (int v = 0; v * kWidth < panel_.place.rows; ++v) {
        P mass = Real(0), share = Real(0);
        for (Index j = keys.begin; j < keys.end; ++j) {
          mass += weights.load(j, v);
          share += math::absolute(weights.load(j, v));
        }
        RowSums<Real>::add(sums_.mass[set], v, mass);
        RowSums<Real>::add(sums_.share[set], v, share);
      }
    });
  }
  void note_query_mass(const LaneTile<Real>& weights, Index first, std::size_t set, Index i) {
    const auto& ranges = sets_[set].of(panel_.place.batch, panel_.place.query + i);
    for_covered(ranges, first, weights.rows, [&](const KeyRange& keys) {
      for (Index j = keys.begin; j < keys.end; ++j) {
        const double weight = double(weights.row(j)[i]);
        sums_.mass[set][std::size_t(i)] += weight;
        sums_.share[set][std::size_t(i)] += std::abs(weight);
      }
    });
  }

  // Writes the measures of query i of the panel, after all keys. With p = |w| / A and A = sum |w|,
  // -sum p log p = log A - (sum |w| log |w|) / A.
  void write(Index i) {
    const auto lane = std::size_t(i), row = std::size_t(panel_.first_row() + i);
    const double size = sums_.size[lane];
    if (nan_[lane] || !std::isfinite(size)) return make_nan(row);
    to_.size[row] = size;
    to_.total[row] = sums_.total[lane];
    const bool any = size > 0;
    to_.entropy[row] = any ? std::max(0.0, std::log(size) - sums_.logs[lane] / size) : 0.0;
    to_.distance[row] = any ? sums_.reach[lane] / size : 0.0;
    for (std::size_t s = 0; s < sets_.size(); ++s) {
      to_.mass[s][row] = sums_.mass[s][lane];
      to_.share[s][row] = any ? std::min(1.0, sums_.share[s][lane] / size) : 0.0;
    }
  }
  // Makes the measures of a row NaN: one of its weights is not finite.
  void make_nan(std::size_t row) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    for (auto* numbers : {&to_.entropy, &to_.total, &to_.size, &to_.distance})
      (*numbers)[row] = nan;
    for (auto* sets : {&to_.mass, &to_.share})
      for (auto& numbers : *sets) numbers[row] = nan;
    std::fill_n(to_.links.begin() + std::ptrdiff_t(row) * to_.links_per_row, to_.links_per_row,
                WeightLink{-1, nan});
  }

  const NormaliserTraits& traits_;
  Bf16Tile bf16_;
  Context c_;  // a copy of the call's context, with bf16_
  const Saved<Real>* saved_;
  const std::vector<OrderedKeys>& sets_;
  WeightMeasures& to_;
  Panel<Real> panel_;
  RowSums<Real> sums_;
  std::vector<char> nan_;                // [lanes]: is the row NaN whatever its weights say?
  LaneTile<Real> states_, work_states_;  // [number][lanes], as forward left them, and a copy
  LaneTile<Real> scores_, projected_;
  Real *top_, *factors_;  // [lanes]: factors_, finish() of the states
  Real* least_;           // [lanes]: the size of the last link's weight
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
