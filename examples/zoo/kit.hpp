// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a file of the zoo starts from: heed's plug points, and plain loops for its second version. Each file has a
// namespace of its own with
//
//   Op<T>                  the op
//   variant<T>(geometry)   its line in programs: name, settings, sizes, op with starting values, traits, mask where it has one
//                          of its own (heed/variants.hpp)
//   plain(op, row)         the same row by row in plain loops; rows see what the caller's mask shows them, and the variant's own
//                          mask is a part of what plain() does

#include "plain.hpp"

#include <heed/mask/patterns.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/variants.hpp>

#include <type_traits>
#include <vector>

namespace zoo {

using heed::Index;

template <class T, class Score = heed::DotScore<T>, class Normaliser = heed::Softmax<T>,
          class Readout = heed::Identity<T>>
using Attention = heed::Attention<T, Score, Normaliser, Readout>;

// The log-sum-exp of vector v that a row normaliser without exponentials reports: 0, or -infinity for a row that sees no
// key.
template <class T>
void report_no_lse(const heed::RowBlock<T>& block, int v) {
  const heed::Index at = v * heed::kLanes<T>;
  const auto top = heed::Pack<T>::load(block.score_max[0] + at);
  select(heed::is_hidden(top), top, heed::Pack<T>(T(0))).store(block.lse[0] + at);
}

// What a normaliser of whole rows does with vector v of a block, key by key: s is a score, g the gradient of its weight. Hidden
// keys have weight and derivative 0, and are no part of sums, whatever the function makes of them.

template <class T>
heed::Pack<T> of_seen(const heed::Pack<T>& s, const heed::Pack<T>& x) {
  return zero_where(heed::is_hidden(s), x);
}
template <class T>
heed::PackPair<T> of_seen(const heed::Pack<T>& s, const heed::PackPair<T>& x) {
  return {of_seen<T>(s, x.first), of_seen<T>(s, x.second)};
}

// Scores become weight(s).
template <class T, class Weight>
void weigh_keys(const heed::RowBlock<T>& block, int v, Weight&& weight) {
  for (Index j = 0; j < block.keys(); ++j) {
    const heed::Pack<T> s = block.scores[0].load(j, v);
    block.scores[0].store(j, v, of_seen<T>(s, weight(s)));
  }
}
// The sum of term(s), and in backward of term(s, g).
template <class T, class Term>
auto sum_over_scores(const heed::RowBlock<T>& block, int v, Term&& term) {
  using Sum = decltype(term(heed::Pack<T>()));
  return heed::sum_over_keys<T, Sum>(block.keys(), [&](Index j) {
    const heed::Pack<T> s = block.scores[0].load(j, v);
    return of_seen<T>(s, term(s));
  });
}
template <class T, class Term>
auto sum_over_pulls(const heed::RowBlock<T>& block, int v, Term&& term) {
  using Sum = decltype(term(heed::Pack<T>(), heed::Pack<T>()));
  return heed::sum_over_keys<T, Sum>(block.keys(), [&](Index j) {
    const heed::Pack<T> s = block.scores[0].load(j, v);
    return of_seen<T>(s, term(s, block.dweights.load(j, v)));
  });
}
// Writes the weight and the derivative dL/ds, the two of pair(s, g).
template <class T, class Pair>
void pull_keys(const heed::RowBlock<T>& block, int v, Pair&& pair) {
  for (Index j = 0; j < block.keys(); ++j) {
    const heed::Pack<T> s = block.scores[0].load(j, v);
    const heed::PackPair<T> both = of_seen<T>(s, pair(s, block.dweights.load(j, v)));
    block.weights.store(j, v, both.first);
    block.dscores[0].store(j, v, both.second);
  }
}

// Shares of exponentials: of(x) = exp(x - top) / sum. A row that sees no key has top 0 and sum 0.
template <class T>
struct Shares {
  heed::Pack<T> top, sum, factor;
  heed::Pack<T> of(const heed::Pack<T>& x) const {
    return heed::math::exp(heed::Pack<T>(x - top)) * factor;
  }
};
// Those of x(s).
template <class T, class X>
Shares<T> shares_of(const heed::RowBlock<T>& block, int v, X&& x) {
  heed::Pack<T> top = -heed::kInfinity<T>;
  for (Index j = 0; j < block.keys(); ++j) {
    const heed::Pack<T> s = block.scores[0].load(j, v);
    top = max(top, select(heed::is_hidden(s), s, x(s)));
  }
  top = of_seen<T>(top, top);
  const heed::Pack<T> sum = sum_over_scores(
      block, v, [&](heed::Pack<T> s) { return heed::math::exp(heed::Pack<T>(x(s) - top)); });
  return {top, sum, inverse_or_zero(sum)};
}
// Those of the scores themselves, whose log-sum-exp they report.
template <class T>
Shares<T> softmax_of(const heed::RowBlock<T>& block, int v) {
  const Shares<T> p = shares_of(block, v, [](heed::Pack<T> s) { return s; });
  (p.top + heed::math::log(p.sum)).store(block.lse[0] + v * heed::kLanes<T>);
  return p;
}

// A streaming normaliser of weights that are divided by the number of keys that the row sees.
template <class T>
struct CountedRows : heed::StreamedRows<T, 1> {
  using Base = heed::StreamedRows<T, 1>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  static constexpr bool counts_visible = true;
  State begin(const Queries& queries) const { return {P(T(0)), {queries.visible}}; }
  P finish(const State& state) const { return heed::inverse_or_zero(state.own[0]); }
};

// A softmax with one more term exp(height) in its sum, in long hand: the weights of the keys, and the log-sum-exp.
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

// f(head, row, column, out) for every number of a readout's output in long hand; `row` counts those of all heads.
template <class S, class F>
void for_each_out(heed::ReadoutContext<S>& all, F&& f) {
  const heed::Geometry& g = all.geometry;
  for (Index n = 0; n < Index(all.out.size()); ++n)
    f(n / (g.len_q * g.dim_v) % g.heads, n / g.dim_v, n % g.dim_v, all.out[std::size_t(n)]);
}
// panel.delta[lane] = tile . with, and the sum over the rows that count joins a parameter's gradient.
template <class T>
void add_dot(const heed::ReadoutPanel<T>& panel,
             const std::type_identity_t<heed::LaneTile<const T>>& with, heed::Param<T>& grad) {
  heed::lane_dot<T>(panel.tile, with, panel.vectors, panel.delta);
  grad.head(panel.head) += T(heed::sum_valid_lanes(panel.delta, panel.valid_lanes));
}
// to = f(column, vector) for a panel's rows.
template <class T, class F>
void for_each_cell(const heed::ReadoutPanel<T>& panel, const heed::LaneTile<T>& to, F&& f) {
  for (Index c = 0; c < panel.tile.rows; ++c)
    for (int v = 0; v < panel.vectors; ++v) to.store(c, v, f(c, v));
}
// to = factor tile
template <class T>
void scale_rows(const heed::ReadoutPanel<T>& panel, T factor, const heed::LaneTile<T>& to) {
  for_each_cell(panel, to, [&](Index c, int v) { return panel.tile.load(c, v) * factor; });
}

}  // namespace zoo
