// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one panel of queries gathers over all tiles of keys in forward over backward, and the way back to its rows:
//
//   dQ. = D. K + D K.                     by the walk, over the row factor, as sums over the keys
//   dG  -> R^T dG, dR += dG Q^T           of a table by distance (engine/relative_rows.hpp), with their tangents
//   df  -> df . df/dq                     of features
//   dQ  -> dQ . dt/dq                     of the score's transform t, which asks for dQ itself beside its tangent
//
// Memory  per worker twice what backward keeps of them; a table's gradient has the size of the table.

#include <heed/engine/hvp_shared.hpp>
#include <heed/engine/queries.hpp>
#include <heed/engine/tile/second_derivatives.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op, class Real>
class MovingQueryGradients {
 public:
  using Score = typename Op::ScoreType;
  using P = Pack<Real>;
  static constexpr bool kTransforms = Score::has_transform;
  static constexpr Index kInputs = query_row_inputs<Score>;

  MovingQueryGradients(const Op& op, const CallContext<Real>& c, const TangentOperands<Real>& d,
                       const KeyTangents<Op, Real>& keys, const Panel<Real>& panel,
                       const ScoreTangents<Op, Real>& tangents, HvpShared<Real>& shared,
                       Scratch<Real>& scratch)
      : op_(op),
        c_(c),
        d_(d),
        keys_(keys),
        panel_(panel),
        tangents_(tangents),
        s_(shared),
        transform_(keys.transform()) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const auto take = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    dq_ = {take(kTransforms ? width : 0), take(width)};
    before_tangent_ = take(needs.transformed);
    sides_ = MovingSides<Real>::take(scratch, needs.any ? width : 0, needs.table_rows,
                                     kInputs, lanes);
    sums_.features = MovingLanes<Real>::take(scratch, Score::query_features, lanes);
    sums_.scalar_tangents = take(scalars_of<Score>);
    if constexpr (table_by_distance<Score>)
      sums_.by_lane = {take_relative(scratch, needs.table_rows, lanes),
                       take_relative(scratch, needs.table_rows, lanes)};
  }
  MovingQueryGradients(const MovingQueryGradients&) = delete;

  // Starts a panel, whose rows and tangents must be loaded.
  void begin() {
    const Index width = panel_.query[0].source().width;
    dq_.tangent.rows = width;
    if (kTransforms) dq_.value.rows = before_tangent_.rows = width;
    if (c_.keys.needs().any) sides_.set_width(width);
    dq_.fill(Real(0));
    sides_.fill(Real(0));
    sums_.features.fill(Real(0));
    sums_.by_lane.fill(Real(0));
    sums_.scalar_tangents.fill(Real(0));
    transform_.begin();
  }

  // Where the walk adds D. K + D K. and, where rows are transformed, D K.
  [[nodiscard]] const MovingLanes<Real>& dq() const { return dq_; }
  [[nodiscard]] const MovingSums<Real>& sums() const { return sums_; }
  // The tangents of the gradients of the table's products with the queries, and these gradients, [table_rows][lanes].
  [[nodiscard]] MovingLanes<Real> table() const {
    return {sides_.value.table, sides_.tangent.table};
  }

  // After the last tile: dQ. of the rows as they are stored. Adds to `parameters` what the panel gives to the score's.
  void finish(Op& parameters) {
    if (c_.keys.needs().any) chain_side_values();
    add_side(dq_.tangent, sides_.tangent.x);
    if constexpr (kTransforms) {
      add_side(dq_.value, sides_.value.x);
      chain_transform(parameters.score);
    }
    double scalars[scalars_of<Score> + 1];
    for (int i = 0; i < scalars_of<Score>; ++i)
      scalars[i] = sum_valid_lanes(sums_.scalar_tangents.row(i), panel_.place.rows);
    chain_scalars(parameters.score, panel_.place.head, scalars);
  }
  // After finish(): to the result, whose rows others add to, too, where `sums_queries`.
  void write() const {
    if (!s_.grads.query.given()) return;
    const TilePlace& place = panel_.place;
    const Source& source = panel_.query[0].source();
    const LaneTile<Real>& from = dq_.tangent;
    Real* to =
        s_.grads.query.row(place.batch, source.query_head, place.query) + source.query_column;
    const Index stride = s_.grads.query.strides().row;
    if (s_.sums_queries)
      add_unpacked_lanes(from.data, from.lanes, place.rows, from.rows, to, stride);
    else
      unpack_lanes(from.data, from.lanes, place.rows, from.rows, to, stride);
  }

 private:
  // dq = row factor dq + side
  void add_side(const LaneTile<Real>& dq, const LaneTile<Real>& side) const {
    for (int v = 0; v < c_.plan.vectors; ++v)
      for (Index col = 0; col < dq.rows; ++col) {
        P g = dq.load(col, v) * c_.row_factor();
        if (c_.keys.needs().any) g += side.load(col, v);
        dq.store(col, v, g);
      }
  }

  // From gradients of features and of the table's products to those of the rows, of parameters, and of numbers of tokens.
  void chain_side_values() {
    const auto& side = panel_.query[0];
    const int vectors = c_.plan.vectors;
    if constexpr (table_by_distance<Score>) {
      add_from_lanes(sums_.by_lane.value, vectors, sides_.value.table);
      add_from_lanes(sums_.by_lane.tangent, vectors, sides_.tangent.table);
    }
    const auto p = moving_scalars<Score>(scalars_in_lanes<Score>(side.scalars()), tangents_.scalars());
    for (int v = 0; v < vectors; ++v) {
      P df[Score::query_features + 1], tangents[Score::query_features + 1];
      for (int i = 0; i < Score::query_features; ++i) {
        df[i] = sums_.features.value.load(i, v);
        tangents[i] = sums_.features.tangent.load(i, v);
      }
      const MovingRow<Real> row{side.lane_row(v), tangents_.side()};
      const auto dp = chain_moving_features<OfQueries>(op_.score, row, p, df, tangents, sides_);
      for (std::size_t i = 0; i < dp.size(); ++i) sums_.scalar_tangents.add(Index(i), v, dp[i]);
    }
    if constexpr (Score::has_table)
      chain_moving_table(op_.score, c_.keys.table(panel_.place.head),
                         keys_.table(panel_.place.head), vectors, sides_);
    if constexpr (kInputs > 0) {
      const auto write = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
        unpack_lanes(from.data, from.lanes, panel_.place.rows, kInputs,
                     to.data() + panel_.first_row() * kInputs, kInputs);
      };
      write(sides_.value.input, s_.dquery_inputs);
      write(sides_.tangent.input, s_.dquery_input_tangents);
    }
  }

  // dQ and dQ. of transformed rows become those of the rows. The gradients of side values, which they have, make room.
  void chain_transform(Score& parameters) {
    const TilePlace& place = panel_.place;
    const auto& side = panel_.query[0];
    const Source& source = side.source();
    if (d_.query.given())
      pack_lanes(d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
                 d_.query.strides().row, place.rows, source.width, before_tangent_.data,
                 before_tangent_.lanes);
    else
      before_tangent_.fill(Real(0));
    transform_.run(RowSide::query, place.head, c_.geometry.query_position(place.query), place.rows,
                   {side.before(), before_tangent_}, sides_.x(), dq_);
    std::vector<Real>& tangents = parameter_tangents_;
    tangents.clear();
    transform_.for_each_tangent([&](Index, Real tangent) { tangents.push_back(tangent); });
    std::size_t n = 0;
    visit_parameters(parameters, [&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) param[i] += tangents[n++];
    });
  }

  const Op& op_;
  const CallContext<Real>& c_;
  TangentOperands<Real> d_;
  const KeyTangents<Op, Real>& keys_;
  const Panel<Real>& panel_;
  const ScoreTangents<Op, Real>& tangents_;
  HvpShared<Real>& s_;
  MovingTransformGradients<Score, Real> transform_;
  MovingLanes<Real> dq_;           // [dim_qk][lanes], the values where rows are transformed
  LaneTile<Real> before_tangent_;  // likewise: of the rows as they are stored
  MovingSides<Real> sides_;        // gradients of side values
  MovingSums<Real> sums_;
  std::vector<Real> parameter_tangents_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
