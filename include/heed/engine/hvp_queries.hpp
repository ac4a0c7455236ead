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
#include <heed/engine/hvps.hpp>
#include <heed/engine/queries.hpp>
#include <heed/engine/tangents.hpp>

#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class MovingQueryGradients {
 public:
  using P = Pack<Real>;

  MovingQueryGradients(const CallContext<Real>& c, const ScoreHvps<Real>& hvps,
                       const TangentOperands<Real>& d, const KeyTangents<Real>& keys,
                       const Panel<Real>& panel, const QueryTangents<Real>& tangents,
                       HvpShared<Real>& shared, Scratch<Real>& scratch)
      : c_(c),
        traits_(c.op.score.traits),
        hvps_(hvps),
        d_(d),
        keys_(keys),
        panel_(panel),
        tangents_(tangents),
        s_(shared),
        transform_(hvps.transform_gradient()) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const auto take = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    dq_ = {take(traits_.has_transform ? width : 0), take(width)};
    before_tangent_ = take(needs.transformed);
    sides_ = MovingSides<Real>::take(scratch, needs.any ? width : 0, needs.table_rows,
                                     traits_.query_inputs, lanes);
    features_ = MovingLanes<Real>::take(scratch, traits_.query_features, lanes);
    scalar_tangents_ = take(traits_.scalars);
    if (traits_.table_by_distance)
      by_lane_ = {take_relative(scratch, needs.table_rows, lanes),
                  take_relative(scratch, needs.table_rows, lanes)};
    scalar_sums_.resize(std::size_t(traits_.scalars));
  }
  MovingQueryGradients(const MovingQueryGradients&) = delete;

  // Starts a panel, whose rows and tangents must be loaded.
  void begin() {
    const Index width = panel_.query[0].source().width;
    dq_.tangent.rows = width;
    if (traits_.has_transform) dq_.value.rows = before_tangent_.rows = width;
    if (c_.keys.needs().any) sides_.set_width(width);
    dq_.fill(Real(0));
    sides_.fill(Real(0));
    features_.fill(Real(0));
    by_lane_.fill(Real(0));
    scalar_tangents_.fill(Real(0));
    if (transform_) transform_->set_zero();
  }

  // Where the walk adds D. K + D K. and, where rows are transformed, D K.
  [[nodiscard]] const MovingLanes<Real>& dq() const { return dq_; }
  // What a tile adds to the panel's sums on its way back.
  [[nodiscard]] MovingBack<Real> back(const MovingLanes<Real>& dscores,
                                      const LaneTile<Real>& hidden, Real* key_lanes,
                                      Real* key_tangent_lanes,
                                      PositionSums<Real>& positions) const {
    return {dscores,
            hidden,
            key_lanes,
            key_tangent_lanes,
            features_,
            scalar_tangents_,
            traits_.table_by_distance ? by_lane_ : table(),
            &positions,
            c_.scale / c_.row_factor()};
  }
  // The tangents of the gradients of the table's products with the queries, and these gradients, [table_rows][lanes].
  [[nodiscard]] MovingLanes<Real> table() const {
    return {sides_.value.table, sides_.tangent.table};
  }

  // After the last tile: dQ. of the rows as they are stored. Adds to `parameters` what the panel gives to the score's.
  void finish(PartGradient<Real>& parameters) {
    if (c_.keys.needs().any) chain_side_values();
    add_side(dq_.tangent, sides_.tangent.x);
    if (traits_.has_transform) {
      add_side(dq_.value, sides_.value.x);
      chain_transform(parameters);
    }
    for (int i = 0; i < traits_.scalars; ++i)
      scalar_sums_[std::size_t(i)] = sum_valid_lanes(scalar_tangents_.row(i), panel_.place.rows);
    s_.vjps.score.add_scalars(panel_.place.head, scalar_sums_.data(), parameters);
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
    const TilePlace& place = panel_.place;
    const int vectors = c_.plan.vectors;
    if (traits_.table_by_distance) {
      add_from_lanes(by_lane_.value, vectors, sides_.value.table);
      add_from_lanes(by_lane_.tangent, vectors, sides_.tangent.table);
    }
    hvps_.features_vjp(RowSide::query, {side.side_tiles(), tangents_.side()}, place.head,
                       c_.geometry.query_position(place.query), side.visible(), vectors, features_,
                       sides_, scalar_tangents_);
    if (traits_.has_table) chain_table(c_.keys.table(place.head), keys_.table(place.head), vectors);
    if (const Index inputs = traits_.query_inputs; inputs > 0) {
      const auto write = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
        unpack_lanes(from.data, from.lanes, place.rows, inputs,
                     to.data() + panel_.first_row() * inputs, inputs);
      };
      write(sides_.value.input, s_.dquery_inputs);
      write(sides_.tangent.input, s_.dquery_input_tangents);
    }
  }
  // Entries are e = W x, hence  dx += W^T de,  dx. += W.^T de + W^T de.
  void chain_table(const Real* table, const Real* table_tangent, int vectors) const {
    SideTiles<Real> crossed = sides_.value;
    crossed.x = sides_.tangent.x;
    crossed.chain(nullptr, table_tangent, vectors);
    sides_.tangent.chain(nullptr, table, vectors);
    if (traits_.has_transform) sides_.value.chain(nullptr, table, vectors);
  }

  // dQ and dQ. of transformed rows become those of the rows. The gradients of side values, which they have, make room.
  void chain_transform(PartGradient<Real>& parameters) {
    const TilePlace& place = panel_.place;
    const auto& side = panel_.query[0];
    const Source& source = side.source();
    if (d_.query.given())
      pack_lanes(d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
                 d_.query.strides().row, place.rows, source.width, before_tangent_.data,
                 before_tangent_.lanes);
    else
      before_tangent_.fill(Real(0));
    hvps_.transform_vjp(RowSide::query, place.head, c_.geometry.query_position(place.query),
                        place.rows, {side.before(), before_tangent_}, sides_.x(), dq_, *transform_);
    parameter_tangents_.assign(std::size_t(parameters.numbers()), 0.0);
    transform_->add_tangents_to(parameter_tangents_.data());
    parameters.add_from(parameter_tangents_.data());
  }

  const CallContext<Real>& c_;
  const ScoreTraits& traits_;
  const ScoreHvps<Real>& hvps_;
  TangentOperands<Real> d_;
  const KeyTangents<Real>& keys_;
  const Panel<Real>& panel_;
  const QueryTangents<Real>& tangents_;
  HvpShared<Real>& s_;
  std::unique_ptr<MovingGradient<Real>> transform_;
  MovingLanes<Real> dq_;            // [dim_qk][lanes], the values where rows are transformed
  LaneTile<Real> before_tangent_;   // likewise: of the rows as they are stored
  MovingSides<Real> sides_;         // gradients of side values
  MovingLanes<Real> features_;      // gradients of features, summed over the tiles
  MovingLanes<Real> by_lane_;       // of a table by distance, as pairs of lanes read it
  LaneTile<Real> scalar_tangents_;  // [scalars][lanes]
  std::vector<double> scalar_sums_, parameter_tangents_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
