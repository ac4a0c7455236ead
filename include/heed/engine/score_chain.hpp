// SPDX-License-Identifier: Apache-2.0
#pragma once

// From dL/dscore of a tile to the gradients of what the score read: dot products, side values of queries
// and keys, table entries and the score's own scalars.

#include <heed/engine/query_side.hpp>
#include <heed/plug/derivative.hpp>

namespace heed::inline HEED_ABI {

// Gradients that a panel gathers for one score map over all tiles.
template <class Op, class T>
struct QueryGrad {
  using Score = typename Op::ScoreType;
  LaneTile<T> dq;        // [width][lanes]: of the rows, times the engine's query factor
  LaneTile<T> features;  // [query_features][lanes]
  LaneTile<T> scalars;   // [scalars][lanes]
  SideTiles<T> side;     // of the rows (through side values), projected rows and table

  [[nodiscard]] static QueryGrad take(const CallContext<Op, T>& c, Scratch<T>& scratch) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const auto rows = [&](Index n) { return LaneTile<T>{scratch.take(n * lanes), n, lanes}; };
    QueryGrad grad;
    grad.dq = rows(width);
    grad.features = rows(Score::query_features);
    grad.scalars = rows(Score::scalars);
    grad.side = SideTiles<T>::take(scratch, SideNeeds<Op>::any ? width : 0, needs.rank,
                                   needs.table_rows, lanes);
    return grad;
  }
  void clear(Index width) {
    dq.rows = width;
    if (SideNeeds<Op>::any) side.x.rows = width;
    for (const auto& tile : {dq, features, scalars, side.x, side.projected, side.table})
      tile.fill(T(0));
  }
};

// One tile on its way back through the score.
template <class Op, class T>
struct ScoreChain {
  using Score = typename Op::ScoreType;
  const CallContext<Op, T>& c;
  const QuerySide<Op, T>& query;
  QueryGrad<Op, T>& grad;
  T* key_lanes;  // scratch [key_features][keys][W]: gradients of key features, lanes not yet summed

  // dscores becomes dL/d(q.k); dprojected is filled where a projection is in use. Hidden pairs (`marks`
  // is -infinity there; may be empty) contribute nothing.
  void run(const TilePlace& place, const LaneTile<T>& dots, const LaneTile<T>& projected,
           const LaneTile<T>& dscores, const LaneTile<T>& dprojected, const LaneTile<T>& marks) const {
    with_score_form(c.op.score, [&](const auto& form) {
      query.with_pairs([&]<bool Scaled>() {
        for (int v = 0; v < c.plan.vectors; ++v) {
          if (marks.data)
            vector<Scaled, true>(form, place, v, dots, projected, dscores, dprojected, marks);
          else
            vector<Scaled, false>(form, place, v, dots, projected, dscores, dprojected, marks);
        }
      });
    });
  }

  // Adds the lanes' sums to the key features' gradients, kFeatures numbers per key.
  void add_key_features(const TilePlace& place, T* dfeatures) const {
    constexpr Index W = kLanes<T>;
    for (Index j = 0; j < place.keys; ++j)
      for (int i = 0; i < Score::key_features; ++i)
        dfeatures[j * Score::key_features + i] +=
            sum_lanes(Pack<T>::load(key_lanes + (i * place.keys + j) * W));
  }

 private:
  template <bool Scaled, bool Hidden, class Form>
  [[gnu::noinline]] void vector(const Form& of_op, const TilePlace& at, int v, LaneTile<T> dots,
                                LaneTile<T> projected, LaneTile<T> dscores,
                                LaneTile<T> dprojected, LaneTile<T> marks) const {
    using P = Pack<T>;
    HeldForm<Form> form = of_op;
    const TilePlace place = at;
    constexpr std::size_t query_features = std::size_t(Score::query_features);
    const auto p = query.scalars();
    const P cap = c.mask.soft_cap(), scale = c.scale;
    ScalarsOf<Score, P> scalar_sum{};
    std::array<P, query_features + 1> feature_sum{};
    const typename QuerySide<Op, T>::template Pairs<Scaled> pairs(query, place, v, projected);
    for (Index j = 0; j < place.keys; ++j) {
      const auto pair = pairs(j, dots.load(j, v));
      PairOf<Score, P> d{};
      ScalarsOf<Score, P> dp{};
      differentiate_score<Score>(form, pair, p, dscores.load(j, v), d, dp);
      if (!Scaled && cap.lane(0) != T(0)) {
        const P saturation = pair.logit / cap;
        d.logit = d.logit * (T(1) - saturation * saturation);
      }
      if constexpr (Hidden) {
        const auto hidden = marks.load(j, v) == P(-kInfinity<T>);
        const auto drop = [&](P& g) { g = select(hidden, P(T(0)), g); };
        for (P* g : {&d.dot, &d.logit, &d.projected, &d.table}) drop(*g);
        for (P& g : d.query) drop(g);
        for (P& g : d.key) drop(g);
        for (P& g : dp) drop(g);
      }
      dscores.store(j, v, mul_add(d.logit, scale, d.dot));
      for (std::size_t i = 0; i < scalar_sum.size(); ++i) scalar_sum[i] += dp[i];
      for (std::size_t i = 0; i < query_features; ++i) feature_sum[i] += d.query[i];
      keep_key_side(place, j, v, d, dprojected, pair);
    }
    for (std::size_t i = 0; i < scalar_sum.size(); ++i) grad.scalars.add(Index(i), v, scalar_sum[i]);
    for (std::size_t i = 0; i < query_features; ++i) grad.features.add(Index(i), v, feature_sum[i]);
  }

  void keep_key_side(const TilePlace& place, Index j, int v, const PairOf<Score, Pack<T>>& d,
                     const LaneTile<T>& dprojected, const PairOf<Score, Pack<T>>& pair) const {
    constexpr Index W = kLanes<T>;
    for (int i = 0; i < Score::key_features; ++i) {
      T* cell = key_lanes + (i * place.keys + j) * W;
      const Pack<T> g = d.key[std::size_t(i)];
      (v == 0 ? g : Pack<T>::load(cell) + g).store(cell);
    }
    if constexpr (Score::has_projection)
      if (grad.side.projected.rows > 0) dprojected.store(j, v, d.projected);
    if constexpr (Score::has_table) grad.side.table.add(Index(pair.key[0].lane(0)), v, d.table);
  }
};

}  // namespace heed::inline HEED_ABI
