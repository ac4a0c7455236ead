// SPDX-License-Identifier: Apache-2.0
#pragma once

// Normalisers and a readout that read numbers of tokens.

#include <heed/plug/readout.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/softmax.hpp>
#include <heed/plug/token_inputs.hpp>

#include <vector>

namespace heed_test {

using heed::Index;

// weight = exp(s) g_j / (sum exp(s) g + exp(x_i)), g_j = sigmoid(y_j) of the key, x_i a sink of the query.
template <class Real>
struct GatedSink : heed::PlainRows {
  static constexpr int query_inputs = 1, key_inputs = 2;
  static constexpr const char* query_inputs_name = "sink";
  auto forward(const auto& row) const {
    const auto s = row.score() + row.key_input(1) * row.query_input(0) * 0.1;
    const auto top = row.largest(s);
    const auto e = heed::math::exp(s - top) * heed::math::sigmoid(row.key_input(0));
    return e / (row.sum(e) + heed::math::exp(row.query_input(0) - top));
  }
};

// out = sigmoid(x) mixed, x the last of two numbers of the query; the first is added to column 0.
template <class Real>
struct Gate : heed::PlainReadout {
  using P = heed::Pack<Real>;
  using PlaceFree = Gate;
  static constexpr int query_inputs = 2;
  static constexpr bool saves_mixed = true;
  static constexpr const char* query_inputs_name = "gate";
  void forward(const heed::ReadoutPanel<Real>& panel) const {
    for (int v = 0; v < panel.vectors; ++v) {
      const P gate = heed::math::sigmoid(panel.query_inputs.load(1, v));
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, gate * panel.tile.load(c, v));
      panel.tile.add(0, v, panel.query_inputs.load(0, v));
    }
  }
  void vjp(const heed::ReadoutPanel<Real>& panel, Gate&) const {
    heed::lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);  // saved: mixed
    for (int v = 0; v < panel.vectors; ++v) {
      const P gate = heed::math::sigmoid(panel.query_inputs.load(1, v));
      const P delta = P::load(panel.delta + v * heed::kLanes<Real>);
      panel.dquery_inputs.add(0, v, panel.tile.load(0, v));
      panel.dquery_inputs.add(1, v, gate * (P(Real(1)) - gate) * delta);
      (gate * delta).store(panel.delta + v * heed::kLanes<Real>);
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, gate * panel.tile.load(c, v));
    }
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const heed::Geometry& g = all.geometry;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i) {
          S* out = all.out_row(b, h, i);
          for (Index c = 0; c < g.dim_v; ++c)
            out[c] = heed::math::sigmoid(all.query_input(b, h, i, 1, 2)) * out[c];
          out[0] = out[0] + all.query_input(b, h, i, 0, 2);
        }
  }
};

// A streaming softmax with a sink whose height the query's token brings: the sum is that of the keys and exp(x).
template <class Real>
struct StreamedSink : heed::Softmax<Real> {
  static constexpr int query_inputs = 1;
  using Base = heed::Softmax<Real>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  using PlaceFree = void;
  using Mergeable = void;
  State begin(const Queries& queries) const { return this->begin_with(queries.input(0)); }
  // dL/dx = -w delta, w = exp(x - lse) the sink's weight
  void vjp(const Queries& queries, const State& state, P delta, auto&) const {
    queries.add_input(0,
                      P(Real(0)) - heed::math::exp(P(queries.input(0) - this->lse(state))) * delta);
  }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    std::vector<S> scores = row.scores[0];
    scores.push_back(row.query_inputs[0]);
    std::vector<S> weights = heed::long_hand_softmax(scores);
    weights.pop_back();
    return weights;
  }
  template <class S>
  S reference_lse(const heed::LongHandRow<S>& row, std::size_t) const {
    std::vector<S> scores = row.scores[0];
    scores.push_back(row.query_inputs[0]);
    return heed::log_sum_exp(scores);
  }
};

}  // namespace heed_test
