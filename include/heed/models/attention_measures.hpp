// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures of an attention layer's last forward pass for reports: means over heads and tokens. They are computed in double
// by the reference, too slow for training loops. Measures of rows and pairs can be restricted to some tokens, taken as
// queries; prototypes_in_use then counts the prototypes of these tokens taken as keys.
//
//   every op           the diagnostics that the op reports per row (ProjectedAttention::diagnostics), and the fraction of
//                      rows that took 1, 2, ... steps
//   pair measures      Score::measure() of visible pairs: mean resonance, and the fraction of pairs
//                      whose gate input crosses the vigilance (ops/dar/gate.hpp)
//   lambda             factor of the second softmax of a differential op, mean over heads and rows
//   mean_gate          mean gate of a gated readout, in (0, 1)
//   intent_distance    |W_I - P W_I| / |W_I|, P the projection onto the rows of W_Q, W_K and W_V of the same
//                      head: 0 where the intent could be calculated from q, k and v, sqrt(1 - 3 d / C) for
//                      random rows of d columns in C
//   prototypes_in_use  prototypes that are the category of some key, per head

#include <heed/nn/projected_attention.hpp>
#include <heed/reference/rows.hpp>

#include <cmath>
#include <map>
#include <set>
#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

using Measure = std::pair<std::string, double>;

// The tokens that are measured: (batch, len) numbers, sequence by sequence, not 0 for a chosen token; empty for all tokens.
struct ChosenTokens {
  std::span<const char> marks = {};
  Index len = 0;

  [[nodiscard]] bool all() const { return marks.empty(); }
  [[nodiscard]] bool operator()(Index b, Index t) const {
    return marks.empty() || marks[std::size_t(b * len + t)] != 0;
  }
  // Number of chosen tokens in the first `sequences`.
  [[nodiscard]] Index count(Index sequences) const {
    Index chosen = 0;
    for (Index b = 0; b < sequences; ++b)
      for (Index t = 0; t < len; ++t) chosen += (*this)(b, t);
    return chosen;
  }
};

namespace detail {

// The means over the chosen rows of the numbers that the op reports per row.
template <class Op>
[[nodiscard]] std::vector<Measure> row_means(const ProjectedAttention<Op>& layer, Index batch,
                                             const ChosenTokens& chosen) {
  if (chosen.all()) return layer.diagnostics();
  const auto& saved = layer.saved();
  Geometry g = layer.heads();
  g.batch = batch;
  g.len_q = chosen.len;
  const double rows = double(chosen.count(batch) * g.heads);
  std::vector<Measure> means;
  for (std::size_t d = 0; d < saved.diagnostic_names.size(); ++d) {
    if (!layer.stage.has_mean(d)) continue;
    double sum = 0;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      if (chosen(b, i)) sum += double(saved.diagnostics[d][std::size_t(g.row_index(b, h, i))]);
    });
    means.emplace_back(saved.diagnostic_names[d], sum / std::max(1.0, rows));
  }
  return means;
}

// The first sequences of a layer's last forward pass, as a problem for the reference.
template <class Op>
[[nodiscard]] reference::Problem<double> last_problem(const ProjectedAttention<Op>& layer,
                                                      Index batch, Index sequences) {
  using Real = typename Op::Scalar;
  const Inputs<Real> in = layer.inputs(batch);
  reference::Problem<double> problem;
  const auto copy = [&](const StoredView<const Real>& from, std::vector<double>& to) {
    const Shape& s = from.shape();
    for (Index b = 0; from.given() && b < sequences; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          for (Index c = 0; c < s.dim; ++c) to.push_back(double(from(b, h, t, c)));
  };
  copy(in.query, problem.query);
  copy(in.key, problem.key);
  copy(in.value, problem.value);
  copy(in.extra, problem.extra);
  copy(in.query_inputs, problem.query_inputs);
  copy(in.key_inputs, problem.key_inputs);
  problem.query_inputs_shape = in.query_inputs.shape();
  problem.key_inputs_shape = in.key_inputs.shape();
  for (Shape* shape : {&problem.query_inputs_shape, &problem.key_inputs_shape})
    shape->batch = std::min(shape->batch, sequences);
  Geometry& g = problem.geometry = layer.heads();
  g.batch = sequences;
  g.len_q = in.query.shape().len;
  g.len_kv = in.key.shape().len;
  reference::use_mask(problem, layer.stage.mask_read());
  for (auto& rule : problem.mask.rules)
    if (auto own = rule->of_sequences(0, batch)) rule = std::move(own);
  return problem;
}

// Adds the mean of each number of Score::measure() over all visible pairs.
template <class Op>
void measure_pairs(const Op& op, const reference::Problem<double>& problem,
                   const ChosenTokens& chosen, std::vector<Measure>& to) {
  using Score = typename Op::ScoreType;
  if constexpr (!Score::measure_names.empty()) {
    const Geometry& g = problem.geometry;
    const BoundMask<double> mask(problem.mask, g, "measures_of");
    std::array<double, Score::measure_names.size()> sums{};
    double pairs = 0;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h) {
        reference::MapScores scores(op, problem, mask, b, h, 0);
        for (Index i = 0; i < g.len_q; ++i) {
          if (!chosen(b, i)) continue;
          scores.take_query(i);
          for (Index j = 0; j < g.len_kv; ++j) {
            if (!mask.visible(b, h, i, j)) continue;
            const auto measures = op.score.measure(scores.pair(j), scores.scalars());
            for (std::size_t m = 0; m < sums.size(); ++m) sums[m] += measures[m];
            ++pairs;
          }
        }
      }
    for (std::size_t m = 0; m < sums.size(); ++m)
      to.emplace_back(Score::measure_names[m], sums[m] / std::max(1.0, pairs));
  }
}

template <class Op>
void measure_lambda(const Op& op, const reference::Problem<double>& problem,
                    const ChosenTokens& chosen, std::vector<Measure>& to) {
  if constexpr (requires { op.normaliser.lambda_of(Index(0), 0.0); }) {
    const Geometry& g = problem.geometry;
    double sum = 0, rows = 0;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      if (!chosen(b, i)) return;
      sum += op.normaliser.lambda_of(
          h, problem.extra.empty() ? 0.0 : problem.extra[std::size_t(g.row_index(b, h, i))]);
      ++rows;
    });
    to.emplace_back("lambda", sum / std::max(1.0, rows));
  }
}

// Adds the mean gate: the readout applied to rows of ones.
template <class Op>
void measure_gate(const Op& op, const reference::Problem<double>& p, const ChosenTokens& chosen,
                  std::vector<Measure>& to) {
  if constexpr (Op::ReadoutType::gates) {
    const std::vector<double> ones(std::size_t(p.geometry.query_rows() * p.geometry.dim_v), 1.0);
    ReadoutContext<double> context{p.geometry, ones, p.query, p.key, p.value, p.extra, {}, {}};
    context.query_inputs = reference::query_columns(p, InputColumns<Op>::readout_query);
    op.read_out_reference(context);
    const Geometry& g = p.geometry;
    double sum = 0, numbers = 0;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      if (!chosen(b, i)) return;
      const double* row = context.out.data() + g.row_index(b, h, i) * g.dim_v;
      for (Index c = 0; c < g.dim_v; ++c) sum += row[c];
      numbers += double(g.dim_v);
    });
    to.emplace_back("mean_gate", sum / std::max(1.0, numbers));
  }
}

// The space that a set of rows spans, as orthonormal axes.
class RowSpace {
 public:
  // The part of the row that is orthogonal to the space. It is projected twice: the second pass removes the part that
  // rounding leaves inside the space. A rest that is nothing but rounding becomes 0.
  [[nodiscard]] std::vector<double> outside(std::vector<double> row) const {
    const double whole = dot(row, row);
    for (int pass = 0; pass < 2; ++pass)
      for (const std::vector<double>& axis : axes_) {
        const double along = dot(axis, row);
        for (std::size_t c = 0; c < row.size(); ++c) row[c] -= along * axis[c];
      }
    if (dot(row, row) <= 1e-20 * whole) row.assign(row.size(), 0.0);
    return row;
  }
  void add(const std::vector<double>& row) {
    std::vector<double> rest = outside(row);
    const double norm = std::sqrt(dot(rest, rest));
    if (norm == 0) return;
    for (double& x : rest) x /= norm;
    axes_.push_back(std::move(rest));
  }
  [[nodiscard]] static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
    return sum;
  }

 private:
  std::vector<std::vector<double>> axes_;
};

template <class Op>
void measure_intent(const ProjectedAttention<Op>& layer, std::vector<Measure>& to) {
  if constexpr (Op::ReadoutType::gates) {
    const auto w = layer.input_weights();
    const Geometry& g = layer.heads();
    const Index gate = w.extra.rows / g.heads;
    const auto row_of = [](const auto& m, Index r) {
      return std::vector<double>(m.row(r), m.row(r) + m.columns);
    };
    double left = 0, all = 0;
    for (Index h = 0; h < g.heads && w.extra.given(); ++h) {
      RowSpace space;
      for (Index c = 0; c < g.dim_qk; ++c) {
        space.add(row_of(w.query, h * g.dim_qk + c));
        space.add(row_of(w.key, g.kv_head(h) * g.dim_qk + c));
      }
      for (Index c = 0; c < g.dim_v; ++c) space.add(row_of(w.value, g.kv_head(h) * g.dim_v + c));
      for (Index c = 0; c < gate; ++c) {
        const std::vector<double> row = row_of(w.extra, h * gate + c), rest = space.outside(row);
        left += RowSpace::dot(rest, rest);
        all += RowSpace::dot(row, row);
      }
    }
    if (all > 0) to.emplace_back("intent_distance", std::sqrt(left / all));
  }
}

template <class Op>
void measure_prototypes(const Op& op, const reference::Problem<double>& problem,
                        const ChosenTokens& chosen, std::vector<Measure>& to) {
  using Score = typename Op::ScoreType;
  if constexpr (Score::has_table) {
    const Geometry& g = problem.geometry;
    const BoundMask<double> mask(problem.mask, g, "measures_of");
    std::set<std::pair<Index, Index>> used;  // head, prototype
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h) {
        reference::MapScores scores(op, problem, mask, b, h, 0);
        scores.take_query(0);
        for (Index j = 0; j < g.len_kv; ++j)
          if (chosen(b, j)) used.emplace(h, Index(scores.pair(j).key[0]));
      }
    to.emplace_back("prototypes_in_use",
                    double(used.size()) / std::max<double>(1, double(g.heads)));
  }
}

// Adds the fractions of rows that took 1, 2, ... steps, if the op reports its steps.
template <class Op>
void measure_steps(const ProjectedAttention<Op>& layer, Index batch, Index len,
                   const ChosenTokens& chosen, std::vector<Measure>& to) {
  const auto& saved = layer.saved();
  Geometry g = layer.heads();
  g.batch = batch;
  g.len_q = len;
  for (std::size_t d = 0; d < saved.diagnostic_names.size(); ++d) {
    if (saved.diagnostic_names[d] != "steps_used") continue;
    std::map<Index, double> counts;
    double rows = 0;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      if (!chosen(b, i)) return;
      ++counts[Index(saved.diagnostics[d][std::size_t(g.row_index(b, h, i))])];
      ++rows;
    });
    for (const auto& [steps, count] : counts)
      to.emplace_back("steps_used=" + std::to_string(steps), count / rows);
  }
}

}  // namespace detail

// The measures of the layer's last forward(), which had `batch` sequences. Measures of pairs read
// only the first `sequences` of them. With chosen tokens, measures that belong to no token are left
// out, and all measures if none of the chosen tokens is in the sequences read.
template <class Op>
[[nodiscard]] std::vector<Measure> measures_of(const ProjectedAttention<Op>& layer, Index batch,
                                               Index sequences = 2,
                                               const ChosenTokens& chosen = {}) {
  sequences = std::min(batch, sequences);
  if (!chosen.all()) {
    const Index len = layer.inputs(batch).query.shape().len;
    require(chosen.len == len && Index(chosen.marks.size()) == batch * len,
            "measures_of: chosen has ", chosen.marks.size(), " marks for sequences of ", chosen.len,
            " tokens, the layer has read ", batch, " sequences of ", len);
    if (chosen.count(sequences) == 0) return {};
  }
  std::vector<Measure> measures = detail::row_means(layer, batch, chosen);
  const auto problem = detail::last_problem(layer, batch, sequences);
  detail::measure_steps(layer, batch, problem.geometry.len_q, chosen, measures);
  const auto op = reference::cast_whole_op<double>(layer.stage.op);
  detail::measure_pairs(op, problem, chosen, measures);
  detail::measure_lambda(op, problem, chosen, measures);
  detail::measure_gate(op, problem, chosen, measures);
  if (chosen.all()) detail::measure_intent(layer, measures);
  detail::measure_prototypes(op, problem, chosen, measures);
  return measures;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
