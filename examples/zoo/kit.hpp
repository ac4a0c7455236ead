// SPDX-License-Identifier: Apache-2.0
#pragma once

// The common part of the zoo's files: heed's plug points, and plain loops for each variant's second
// version. Each file has a namespace of its own with
//
//   Op<T>                  the op
//   variant<T>(geometry)   its line in programs: name, settings, sizes, op with starting values, traits, mask or choice of
//                          keys where it has one of its own (heed/variants.hpp)
//   plain(op, row)         the same row by row in plain loops; rows see what the caller's mask shows them, and the variant's own
//                          mask is a part of what plain() does

#include "plain.hpp"

#include <heed/plug/own_score.hpp>
#include <heed/variants.hpp>

#include <type_traits>
#include <vector>

namespace zoo {

using heed::Index;

template <class T, class Score = heed::DotScore<T>, class Normaliser = heed::Softmax<T>,
          class Readout = heed::Identity<T>>
using Attention = heed::Attention<T, Score, Normaliser, Readout>;

// A streaming normaliser of weights that are divided by the number of keys that the row sees.
template <class T>
struct CountedRows : heed::StreamedRows<T, 1> {
  using Base = heed::StreamedRows<T, 1>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  static constexpr bool counts_visible = true;
  State begin(const Queries& queries) const { return {P(T(0)), {queries.visible}}; }
  P finish(const State& state) const { return heed::inverse_or_zero(state.own[0]); }
};

// Reference of a softmax with one more term exp(height) in its sum: the weights of the keys, and the log-sum-exp.
template <class S>
std::vector<S> softmax_beside(const S& height, heed::LongHandRow<S> row) {
  row.scores[0].push_back(height);
  std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
  weights.pop_back();
  return weights;
}
template <class S>
S log_sum_exp_beside(const S& height, heed::LongHandRow<S> row) {
  row.scores[0].push_back(height);
  return heed::log_sum_exp(row.scores[0]);
}

// Calls f(head, row, column, out) for every number of a readout's output in its reference; `row`
// counts the rows of all heads.
template <class S, class F>
void for_each_out(heed::ReadoutContext<S>& all, F&& f) {
  const heed::Geometry& g = all.geometry;
  for (Index n = 0; n < Index(all.out.size()); ++n)
    f(n / (g.len_q * g.dim_v) % g.heads, n / g.dim_v, n % g.dim_v, all.out[std::size_t(n)]);
}
// panel.delta[lane] = tile . with; `factor` times the sum over the rows that count joins a parameter's gradient.
template <class T>
void add_dot(const heed::ReadoutPanel<T>& panel,
             const std::type_identity_t<heed::LaneTile<const T>>& with, heed::Param<T>& grad,
             double factor = 1) {
  heed::lane_dot<T>(panel.tile, with, panel.vectors, panel.delta);
  grad.head(panel.head) += T(factor * heed::sum_valid_lanes(panel.delta, panel.valid_lanes));
}
// to = f(column, vector) for a panel's rows.
template <class T, class F>
void for_each_cell(const heed::ReadoutPanel<T>& panel, const heed::LaneTile<T>& to, F&& f) {
  for (Index c = 0; c < panel.tile.rows; ++c)
    for (int v = 0; v < panel.vectors; ++v) to.store(c, v, f(c, v));
}
// to += factor from
template <class T>
void add_scaled(const heed::ReadoutPanel<T>& panel, T factor,
                const std::type_identity_t<heed::LaneTile<const T>>& from,
                const heed::LaneTile<T>& to) {
  for_each_cell(panel, to,
                [&](Index c, int v) { return to.load(c, v) + from.load(c, v) * factor; });
}
// to = factor tile
template <class T>
void scale_rows(const heed::ReadoutPanel<T>& panel, T factor, const heed::LaneTile<T>& to) {
  for_each_cell(panel, to, [&](Index c, int v) { return panel.tile.load(c, v) * factor; });
}

}  // namespace zoo
