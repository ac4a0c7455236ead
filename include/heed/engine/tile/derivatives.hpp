// SPDX-License-Identifier: Apache-2.0
#pragma once

// The way back of one tile through the score. With g = dL/dscore of a pair and d.x = g dscore/dx from the score:
//
//   dL/d(scaled dot) = d.dot factor + d.logit (1 - (logit/cap)^2) factor      the second factor of a soft cap only
//   dL/d(query feature), dL/d(scalar) += d.query, dp                          summed over the keys of the tile
//   dL/d(key feature)    = d.key                                              summed over the queries, behind the tile
//   dL/d(projected dot)  = d.projected,    dL/d(table entry) += d.table
//   dL/d(entry of the table of positions) += d.position

#include <heed/engine/tile/scores.hpp>
#include <heed/plug/derivative.hpp>

namespace heed {
inline namespace HEED_ABI {

// Gradients that a panel gathers for one score map over all tiles.
template <class Op, class Real>
struct QueryGrad {
  using Score = typename Op::ScoreType;
  LaneTile<Real> dq;        // [width][lanes]: of the rows, over CallContext::row_factor()
  LaneTile<Real> features;  // [query_features][lanes]
  LaneTile<Real> scalars;   // [scalars][lanes]
  LaneTile<Real> by_lane;   // of a table by distance, as pairs of lanes read it
  SideTiles<Real> side;     // of the rows (through side values), projected rows and table

  [[nodiscard]] static QueryGrad take(const CallContext<Op, Real>& c, Scratch<Real>& scratch) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const auto rows = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    QueryGrad grad;
    grad.dq = rows(width);
    grad.features = rows(Score::query_features);
    grad.scalars = rows(scalars_of<Score>);
    if constexpr (table_by_distance<Score>)
      grad.by_lane = take_relative(scratch, needs.table_rows, lanes);
    grad.side = SideTiles<Real>::take(scratch, SideNeeds<Op>::any ? width : 0, needs.rank,
                                      needs.table_rows, query_row_inputs<Score>, lanes);
    return grad;
  }
  void clear(Index width) {
    dq.rows = width;
    if (SideNeeds<Op>::any) side.x.rows = width;
    for (const auto& tile :
         {dq, features, scalars, by_lane, side.x, side.projected, side.table, side.input})
      tile.fill(Real(0));
  }
};

// One tile of pairs on its way back, [keys][lanes] each.
template <class Real>
struct ScoredTile {
  TilePlace place;
  LaneTile<Real> dots, projected;  // scaled and projected dot products
  LaneTile<Real> dscores;          // in: dL/dscore; out: dL/d(q.k), over CallContext::row_factor()
  LaneTile<Real> dprojected;       // out, where a projection is in use
  LaneTile<Real> marks;  // -infinity where a pair is hidden, else 0; empty: none is hidden
  Real* key_lanes;  // out, [key_features][keys][W]: gradients of key features, lanes not yet summed
};

template <class Op, class Real>
struct ScoreChain {
  using Score = typename Op::ScoreType;
  using P = Pack<Real>;
  const CallContext<Op, Real>& c;
  const QuerySide<Op, Real>& query;
  QueryGrad<Op, Real>& grad;
  PositionSumsOf<Score, Real>& positions;
  int key_gradients = Score::key_features;  // those that the score's form has

  // Hidden pairs contribute nothing.
  void run(const ScoredTile<Real>& tile) {
    Score::with_form(c.op.score, [&](const auto& form) {
      key_gradients = key_gradients_of<std::remove_cvref_t<decltype(form)>>();
      clear_key_lanes(tile);
      for (int v = 0; v < c.plan.vectors; ++v)
        if (tile.marks.data)
          run_vector<true>(form, tile, v);
        else
          run_vector<false>(form, tile, v);
    });
  }

  // Adds the lanes' sums to the key features' gradients, key_features numbers per key.
  void add_key_features(const ScoredTile<Real>& tile, Real* dfeatures) const {
    constexpr Index W = kLanes<Real>, features = Score::key_features;
    const Index keys = tile.place.keys;
    for (int i = 0; i < key_gradients; ++i)
      for (Index j = 0; j < keys; j += W) {
        const Index count = std::min(W, keys - j);
        P lanes[std::size_t(W)];
        for (Index k = 0; k < W; ++k)
          lanes[k] = k < count ? P::load(tile.key_lanes + (i * keys + j + k) * W) : P(Real(0));
        const P sums = detail::sums_of_lanes(lanes);
        for (Index k = 0; k < count; ++k) dfeatures[(j + k) * features + i] += sums.v[k];
      }
  }

 private:
  // Those of keys that vector 0, which sets them, is not computed with.
  void clear_key_lanes(const ScoredTile<Real>& tile) const {
    const KeyRange set = tile.place.keys_of(0);
    for (int i = 0; i < key_gradients; ++i) {
      const auto clear = [&](Index first, Index end) {
        std::fill(tile.key_lanes + (i * tile.place.keys + first) * kLanes<Real>,
                  tile.key_lanes + (i * tile.place.keys + end) * kLanes<Real>, Real(0));
      };
      clear(0, set.begin);
      clear(set.end, tile.place.keys);
    }
  }

  template <class Form>
  [[nodiscard]] static constexpr int key_gradients_of() {
    if constexpr (GathersSums<Form>)
      return Form::key_gradients;
    else
      return Score::key_features;
  }

  // What a loop over the keys adds up per lane, for forms that leave it to us.
  template <class Form>
  struct Sums {
    std::array<P, std::size_t(Score::query_features)> query{};
    ScalarsOf<Score, P> scalars{};

    template <class F>
    void for_each(Sums& other, F&& f) {
      for (std::size_t i = 0; i < query.size(); ++i) f(query[i], other.query[i]);
      for (std::size_t i = 0; i < scalars.size(); ++i) f(scalars[i], other.scalars[i]);
    }
  };
  template <GathersSums Form>
  struct Sums<Form> {
    std::array<P, std::size_t(Form::lane_sums)> sums{};

    template <class F>
    void for_each(Sums& other, F&& f) {
      for (std::size_t i = 0; i < sums.size(); ++i) f(sums[i], other.sums[i]);
    }
  };

  // One vector of queries against all keys of the tile. Dual numbers cost little where every call is part of the
  // loop, hence flatten. GCC 12 flattens no call inside of a lambda that it has cloned, hence the attribute of
  // run_back.
  template <bool Hidden, class Form>
  void run_vector(const Form& form, const ScoredTile<Real>& tile, int v) const {
    if constexpr (HasScoreVjp<Score, P>)
      by_hand<Hidden>(form, tile, v);
    else
      by_duals<Hidden>(form, tile, v);
  }
  template <bool Hidden, class Form>
  [[gnu::noinline]] void by_hand(const Form& form, ScoredTile<Real> tile, int v) const {
    loop_over_keys<Hidden>(form, tile, v);
  }
  template <bool Hidden, class Form>
  [[gnu::noinline, gnu::flatten]] void by_duals(const Form& form, ScoredTile<Real> tile,
                                                int v) const {
    loop_over_keys<Hidden>(form, tile, v);
  }

  // Invariant: behind key j, `total` holds the sums over the vector's keys up to j, and their dscores are those of the
  // dots.
  template <bool Hidden, class Form>
  [[gnu::always_inline]] void loop_over_keys(const Form& of_op, const ScoredTile<Real>& tile,
                                             int v) const {
    HeldForm<Form> form = of_op;
    const auto p = query.scalars();
    const P cap = c.mask.soft_cap(), logit_part = c.scale / c.row_factor();
    const bool capped = c.mask.soft_cap() != Real(0);
    const LanePairs<Op, Real> pairs(query, tile.place, v, tile.projected);
    const LaneTile<Real> dots = tile.dots, dscores = tile.dscores, marks = tile.marks;
    const KeyRange keys = tile.place.keys_of(v);
    Sums<Form> total;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const auto pair = pairs(j, dots.load(j, v));
      PairOf<Score, P> d{};
      const auto run_back = [&](Sums<Form> & sums) __attribute__((always_inline)) {
        differentiate(form, pair, p, dscores.load(j, v), d, sums);
        if (!capped) [[likely]]
          return;
        // logit = cap tanh(x / cap):  dx = dlogit (1 - (logit / cap)^2)
        const P saturation = pair.logit / cap;
        d.logit = d.logit * (Real(1) - saturation * saturation);
      };
      if constexpr (Hidden) {
        Sums<Form> own;
        run_back(own);
        const auto hidden = is_hidden(marks.load(j, v));
        const auto drop = [&](P& g) { g = zero_where(hidden, g); };
        for (P* g : {&d.dot, &d.logit, &d.projected, &d.table, &d.position}) drop(*g);
        for (P& g : d.key) drop(g);
        own.for_each(total, [&](P& g, P& sum) {
          drop(g);
          sum += g;
        });
      } else {
        run_back(total);
      }
      dscores.store(j, v, mul_add(d.logit, logit_part, d.dot));
      keep_key_side<key_gradients_of<Form>()>(tile, j, v, d, pair);
    }
    add_sums(form, total, pairs.query(), p, v);
  }

  // d of the pair; what belongs to its query and to the score's scalars is added to `sums`.
  template <class Form>
  [[gnu::always_inline]] static void differentiate(const Form& form, const PairOf<Score, P>& pair,
                                                   const ScalarsOf<Score, P>& p, P g,
                                                   PairOf<Score, P>& d, Sums<Form>& sums) {
    if constexpr (GathersSums<Form>) {
      form.score_vjp(pair, p, g, d, sums.sums);
    } else {
      differentiate_score<Score>(form, pair, p, g, d, sums.scalars);
      for (std::size_t i = 0; i < sums.query.size(); ++i) sums.query[i] += d.query[i];
    }
  }
  template <class Form, class Query>
  void add_sums(const Form& form, const Sums<Form>& total, const Query& query_values,
                const ScalarsOf<Score, P>& p, int v) const {
    Query dquery{};
    ScalarsOf<Score, P> dp{};
    if constexpr (GathersSums<Form>) {
      form.finish(total.sums, query_values, p, dquery, dp);
    } else {
      dquery = total.query;
      dp = total.scalars;
    }
    if constexpr (normed_dots<Score>) dquery[0] *= c.feature_factor();
    for (std::size_t i = 0; i < dp.size(); ++i) grad.scalars.add(Index(i), v, dp[i]);
    for (std::size_t i = 0; i < dquery.size(); ++i) grad.features.add(Index(i), v, dquery[i]);
  }

  template <int KeyGradients>
  [[gnu::always_inline]] void keep_key_side(const ScoredTile<Real>& tile, Index j, int v,
                                            const PairOf<Score, P>& d,
                                            const PairOf<Score, P>& pair) const {
    for (int i = 0; i < KeyGradients; ++i) {
      Real* cell = tile.key_lanes + (i * tile.place.keys + j) * kLanes<Real>;
      const P g = d.key[std::size_t(i)];
      (v == 0 ? g : P::load(cell) + g).store(cell);
    }
    if constexpr (Score::has_projection)
      if (grad.side.projected.rows > 0) tile.dprojected.store(j, v, d.projected);
    if constexpr (table_by_distance<Score>)
      grad.by_lane.add(
          relative_place<Real>(
              c.op.score.table_clip(),
              c.geometry.query_position(tile.place.query + v * kLanes<Real>) - tile.place.key - j),
          v, d.table);
    else if constexpr (Score::has_table)
      grad.side.table.add(Index(pair.key[0].lane(0)), v, d.table);
    if constexpr (Score::has_positions)
      positions.add(tile.place.query + v * kLanes<Real>, tile.place.key + j, d.position);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
