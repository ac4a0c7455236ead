// SPDX-License-Identifier: Apache-2.0
#pragma once

// The reference: any Attention<S, Score, Normaliser, Readout> written out in plain loops, simple enough to be obviously
// right, on any scalar (float, double, long double, std::complex<double>, Dual, Var).
//
//   rows[m][j] = score of map m, for the keys j that query i sees   (rows.hpp)
//   weight     = op.normaliser.reference(row), then problem.dropout
//   mixed_i    = sum_j weight_j v_j
//   out        = op.readout.reference(mixed)
//
// Nothing is streamed or blocked. Hidden pairs are left out: their keys and values are never read. A row that sees no
// key has mixed 0 and the lse of no scores, -infinity unless the normaliser says otherwise.
//
//   const auto result = reference::forward(op, problem);
//   const auto gradients = reference::gradients(op, problem, grad_out);   // by the tape
//
// Errors  std::invalid_argument when sizes disagree or the op refuses its hyper-parameters.
// Cost    O(batch heads len_q len_kv dim), one thread; gradients keep every operation in memory.

#include <heed/autodiff/tape.hpp>
#include <heed/plug/check.hpp>
#include <heed/plug/row_calls.hpp>
#include <heed/reference/rows.hpp>
#include <heed/simd/keep_bits.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace reference {

// The sizes from which tests compute their tolerances, over visible keys j:
//   s_row               per row, over all maps: max_j scale sum_c |q_c k_jc|
//   weighted_abs_value  per element of mixed: sum_j p_j |v_j|. p_j is weight_terms(rows, weights)
//                       if the normaliser has it; else |weight_j|, or p1_j + |p1_j - weight_j|
//                       where a weight is the difference of p1_j and p2_j of two maps
struct ErrorScale {
  std::vector<double> s_row, weighted_abs_value;
};

template <class S>
struct Result {
  std::vector<S> out, mixed;        // (batch, heads, len_q, dim_v)
  std::vector<std::vector<S>> lse;  // per map, (batch, heads, len_q): natural-log sum of exp
  // Filled on request, (batch, heads, len_q, len_kv):
  std::vector<S> weights;              // factors of the values; 0 where hidden or dropped
  std::vector<std::vector<S>> scores;  // per map; -infinity where hidden
  ErrorScale error_scale;
  // Diagnostics of the readout, each (batch, heads, len_q):
  std::vector<std::vector<double>> diagnostics;
  std::vector<S> steps;  // (batch, heads, len_q), if the readout gives them
};

struct Request {
  bool weights = false, scores = false, error_scale = false;
};

namespace detail {

// The steps of a forward pass that are the same for every op, and what they read and keep.
template <class S>
class Pass {
 public:
  Pass(const Problem<S>& problem, const Request& request, int maps)
      : problem_(problem),
        g_(problem.geometry),
        request_(request),
        own_mask_(mask_of(problem)),
        mask_(own_mask_, problem.geometry, "reference::forward"),
        values_(problem.value) {
    require(problem.dropout.valid(), "reference::forward: dropout.rate is ", problem.dropout.rate,
            ", it must be in [0, 1)");
    allocate(std::size_t(maps));
  }

 protected:
  // One row and its keys; those of the op stand behind the sequence's, and have their values here.
  struct RowKeys {
    Index b, h, i;
    std::vector<Index> keys;
    std::vector<S> learnt_values = {};
  };

  // Drops weights of a row, mixes its values, and keeps the requested numbers. The terms are those of error_scale.
  void note_row(const RowKeys& at, const std::vector<std::vector<S>>& scores,
                std::vector<S> weights, std::vector<double> terms) {
    const std::vector<Index>& keys = at.keys;
    require(weights.size() == keys.size(), "reference::forward: the normaliser returned ",
            weights.size(), " weights for ", keys.size(), " keys");
    drop(at, weights);
    drop(at, terms);
    const Index row = g_.row_index(at.b, at.h, at.i);
    mix(at, weights, result_.mixed.data() + row * g_.dim_v);
    for (std::size_t m = 0; m < scores.size() && request_.scores; ++m)
      scatter(scores[m], keys, row, result_.scores[m]);
    if (request_.weights) scatter(weights, keys, row, result_.weights);
    if (request_.error_scale) note_values(at, terms, row);
  }

  const Problem<S>& problem_;
  Geometry g_;
  Request request_;
  Mask<double> own_mask_;
  BoundMask<double> mask_;
  std::vector<S> values_;  // as the readout transforms them
  Result<S> result_;

 private:
  // The problem's mask, without its bias if the problem has a bias of its own.
  [[nodiscard]] static Mask<double> mask_of(const Problem<S>& problem) {
    Mask<double> mask = problem.mask;
    if (!problem.bias.empty()) mask.bias = {};
    return mask;
  }

  void allocate(std::size_t maps) {
    const auto rows = std::size_t(g_.query_rows());
    const auto pairs = rows * std::size_t(g_.len_kv);
    const S zero = math::constant<S>(0);
    const S hidden = math::constant<S>(-std::numeric_limits<double>::infinity());
    result_.mixed.assign(rows * std::size_t(g_.dim_v), zero);
    result_.lse.assign(maps, std::vector<S>(rows, hidden));
    if (request_.weights) result_.weights.assign(pairs, zero);
    if (request_.scores) result_.scores.assign(maps, std::vector<S>(pairs, hidden));
    if (!request_.error_scale) return;
    result_.error_scale.s_row.assign(rows, 0.0);
    result_.error_scale.weighted_abs_value.assign(rows * std::size_t(g_.dim_v), 0.0);
  }

  // numbers[n] <- keep ? numbers[n] / (1 - rate) : 0 for the row's pair with keys[n].
  template <class Number>
  void drop(const RowKeys& at, std::vector<Number>& numbers) const {
    const Dropout& dropout = problem_.dropout;
    if (dropout.rate == 0) return;
    const std::uint64_t row_key = dropout.row_keys(at.b, at.h).bits(std::uint64_t(at.i));
    const Number factor = math::constant<Number>(1 / (1 - dropout.rate));
    for (std::size_t n = 0; n < numbers.size(); ++n)
      numbers[n] = keeps(dropout.rate, row_key, at.keys[n]) ? Number(numbers[n] * factor)
                                                            : math::constant<Number>(0);
  }

  [[nodiscard]] const S* value(const RowKeys& at, std::size_t n) const {
    const Index j = at.keys[n];
    if (j >= g_.len_kv) return at.learnt_values.data() + (j - g_.len_kv) * g_.dim_v;
    return values_.data() + ((at.b * g_.kv_heads + g_.kv_head(at.h)) * g_.len_kv + j) * g_.dim_v;
  }

  // mixed[c] = sum_n weight_n value(n)[c]
  void mix(const RowKeys& at, const std::vector<S>& weights, S* mixed) const {
    for (Index c = 0; c < g_.dim_v; ++c)
      mixed[c] = math::dot_product(
          Index(at.keys.size()), [&](Index n) { return weights[std::size_t(n)]; },
          [&](Index n) { return value(at, std::size_t(n))[c]; });
  }

  void note_values(const RowKeys& at, const std::vector<double>& terms, Index row) {
    for (std::size_t n = 0; n < at.keys.size(); ++n)
      for (Index c = 0; c < g_.dim_v; ++c)
        result_.error_scale.weighted_abs_value[std::size_t(row * g_.dim_v + c)] +=
            terms[n] * std::abs(double(math::value_of(value(at, n)[c])));
  }

  void scatter(const std::vector<S>& visible, const std::vector<Index>& keys, Index row,
               std::vector<S>& dense) {
    for (std::size_t n = 0; n < keys.size() && keys[n] < g_.len_kv; ++n)
      dense[std::size_t(row * g_.len_kv + keys[n])] = visible[n];
  }
};

// One forward pass; each member function is a step of it.
template <class Op>
class Forward : Pass<typename Op::Scalar> {
  using S = typename Op::Scalar;
  using Scores = MapScores<typename Op::ScoreType, S>;
  using typename Pass<S>::RowKeys;
  using Pass<S>::problem_, Pass<S>::g_, Pass<S>::request_, Pass<S>::mask_, Pass<S>::values_,
      Pass<S>::result_;
  static constexpr int maps = Op::NormaliserType::maps;

 public:
  Forward(const Op& op, const Problem<S>& problem, const Request& request)
      : Pass<S>(problem, request, maps), op_(op) {
    if constexpr (heed::detail::maps_values<typename Op::ReadoutType>)
      for (S& value : values_) value = op.readout.value(S(value));
  }

  [[nodiscard]] Result<S> run() {
    for (Index b = 0; b < g_.batch; ++b)
      for (Index h = 0; h < g_.heads; ++h) head(b, h);
    read_out();
    return std::move(result_);
  }

 private:
  void head(Index b, Index h) {
    const HeadPairs<S> pairs(problem_, mask_, b, h);
    std::vector<Scores> scores;
    for (int m = 0; m < maps; ++m) scores.emplace_back(op_, problem_, mask_, b, h, m);
    for (Index i = 0; i < g_.len_q; ++i) {
      RowKeys at{b, h, i, pairs.visible_keys(i)};
      if (at.keys.empty() && !sees_learnt_keys()) {
        note_lse(at, long_hand_row(at, std::vector<std::vector<S>>(std::size_t(maps))));
        continue;
      }
      std::vector<std::vector<S>> rows;
      for (Scores& score : scores) {
        score.take_query(i);
        auto& row = rows.emplace_back();
        for (const Index j : at.keys) row.push_back(score(j));
        if (request_.error_scale) note_logits(score, at);
      }
      if constexpr (has_learnt_keys<typename Op::NormaliserType>)
        if (sees_learnt_keys()) add_learnt_keys(at, rows);
      weigh(at, rows);
    }
  }

  [[nodiscard]] bool sees_learnt_keys() const {
    return has_learnt_keys<typename Op::NormaliserType> && mask_.has_first_key();
  }
  // Adds keys that belong to the op, behind those of the sequence.
  void add_learnt_keys(RowKeys& at, std::vector<std::vector<S>>& rows) {
    const auto learnt = heed::detail::learnt_of<S>(op_.normaliser);
    const auto of = learnt.of_head(at.h);
    const S* query = problem_.query.data() + g_.row_index(at.b, at.h, at.i) * g_.dim_qk;
    const S scale = math::constant<S>(problem_.scale.value_or(1 / std::sqrt(double(g_.dim_qk))));
    at.learnt_values.assign(std::size_t(learnt.count * g_.dim_v), math::constant<S>(0));
    if (of.values) std::copy_n(of.values, at.learnt_values.size(), at.learnt_values.begin());
    for (Index r = 0; r < learnt.count; ++r) {
      at.keys.push_back(g_.len_kv + r);
      rows[0].push_back(S(scale * dot(query, 1, of.keys + r * g_.dim_qk, 1, g_.dim_qk)));
    }
  }
  // Computes the weights and mixed values of one row, and keeps the requested numbers.
  void weigh(const RowKeys& at, const std::vector<std::vector<S>>& rows) {
    const LongHandRow<S> of = long_hand_row(at, rows);
    std::vector<S> weights = long_hand_weights(op_.normaliser, of);
    std::vector<double> terms;
    if (request_.error_scale) terms = op_.normaliser.weight_terms(rows, weights);
    this->note_row(at, rows, std::move(weights), std::move(terms));
    note_lse(at, of);
  }

  [[nodiscard]] LongHandRow<S> long_hand_row(const RowKeys& at,
                                             const std::vector<std::vector<S>>& rows) const {
    const auto& [b, h, i, keys, learnt_values] = at;
    LongHandRow<S> of{rows, keys, h, g_.query_position(i), math::constant<S>(0), {}};
    const Index row = g_.row_index(b, h, i);
    if constexpr (Op::NormaliserType::uses_extra) of.extra = problem_.extra[std::size_t(row)];
    if constexpr (Op::NormaliserType::uses_query) {
      const auto from = problem_.query.begin() + row * g_.dim_qk;
      of.query_row.assign(from, from + g_.dim_qk);
    }
    using Columns = InputColumns<Op>;
    if constexpr (Columns::normaliser_query.count > 0)
      of.query_inputs = inputs_of(problem_.query_inputs, problem_.query_inputs_shape, g_, b, h, i,
                                  Columns::normaliser_query);
    for (std::size_t n = 0; n < keys.size() && Columns::normaliser_key.count > 0; ++n)
      of.key_inputs.push_back(inputs_of(problem_.key_inputs, problem_.key_inputs_shape, g_, b, h,
                                        keys[n], Columns::normaliser_key));
    return of;
  }
  void note_lse(const RowKeys& at, const LongHandRow<S>& of) {
    const auto row = std::size_t(g_.row_index(at.b, at.h, at.i));
    for (std::size_t m = 0; m < of.scores.size(); ++m)
      result_.lse[m][row] = op_.normaliser.reference_lse(of, m);
  }

  void note_logits(Scores& score, const RowKeys& at) {
    double& largest = result_.error_scale.s_row[std::size_t(g_.row_index(at.b, at.h, at.i))];
    for (const Index j : at.keys) largest = std::max(largest, score.absolute_logit(j));
  }

  void read_out() {
    const auto reports = std::size_t(Op::ReadoutType::diagnostics);
    ReadoutContext<S> context{g_,
                              result_.mixed,
                              problem_.query,
                              problem_.key,
                              values_,
                              problem_.extra,
                              result_.lse,
                              {},
                              query_columns(problem_, InputColumns<Op>::readout_query)};
    context.diagnostics.assign(reports, std::vector<double>(std::size_t(g_.query_rows())));
    op_.read_out_reference(context);
    result_.out = std::move(context.out);
    result_.diagnostics = std::move(context.diagnostics);
    result_.steps = std::move(context.steps);
  }

  const Op& op_;
};

}  // namespace detail

// Fails to compile, with one sentence, when a part of Op has no reference().
template <class Op>
consteval bool check_long_hand() {
  using S = typename Op::Scalar;
  using Row = reference::Row<S>;
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;
  static_assert(
      requires(const Score& s, const PairOf<Score, S>& pair, const ScalarsOf<Score, S>& p) {
        { s.score(pair, p) } -> std::convertible_to<S>;
      },
      "heed: the reference, and so check_op, runs score() on plain numbers, too: a score needs "
      "`template <class S> S score(const PairOf<Score, S>& pair, const auto& p) const` "
      "(plug/score.hpp)");
  static_assert(
      heed::detail::has_features<heed::detail::OfQueries, Score, Row> &&
          heed::detail::has_features<heed::detail::OfKeys, Score, Row>,
      "heed: the reference, and so check_op, runs features on plain numbers, too: they need "
      "`template <class Row, class S> void query_features_of(const Row& row, S* f) const`, and "
      "key_features_of alike (plug/score.hpp)");
  constexpr bool has_weights = [] {
    if constexpr (heed::detail::has_reference<Normaliser, S>)
      return true;
    else if constexpr (!Normaliser::streams && heed::detail::knows_row_formulas<Normaliser, S>)
      return heed::detail::RowFormula<Normaliser, S>::has_reference();
    else
      return false;
  }();
  static_assert(
      has_weights,
      "heed: a normaliser without reference() cannot be compared with one by check_op: add "
      "`template <class S> std::vector<S> reference(const LongHandRow<S>& row) const`, the weights "
      "of one row in plain loops (plug/normaliser.hpp)");
  static_assert(
      requires(const Op& op, ReadoutContext<S>& context) { op.read_out_reference(context); },
      "heed: a readout without reference() cannot be compared with one by check_op: add "
      "`template <class S> void reference(ReadoutContext<S>& context) const`, its output in plain "
      "loops (plug/readout.hpp)");
  return true;
}

// Runs the op on the problem.
template <class Op>
[[nodiscard]] Result<typename Op::Scalar> forward(const Op& op,
                                                  const Problem<typename Op::Scalar>& problem,
                                                  const Request& request = {}) {
  static_assert(check_long_hand<Op>());
  require_sizes(sizes_of(op, problem.geometry), problem, "reference::forward");
  if constexpr (std::floating_point<typename Op::Scalar>)
    op.validate(problem.geometry, "reference::forward");
  return detail::Forward<Op>(op, problem, request).run();
}

// Gradients of sum(out o grad_out) + sum(lse o grad_lse) + sum(steps o grad_steps), each of the shape of its tensor.
template <class Op>
struct Gradients {
  using Real = typename Op::Scalar;
  std::vector<Real> dquery, dkey, dvalue, dextra;
  std::vector<Real> dbias;  // for problem.bias; empty when the bias is the mask's or not given
  Op op;                    // gradients of the parameters
  std::vector<Real> dquery_inputs = {}, dkey_inputs = {};
};

namespace detail {

template <class Real>
void record(Tape<Real>& tape, Var<Real>* numbers, Index count) {
  for (Index i = 0; i < count; ++i) numbers[i] = tape.variable(numbers[i].value);
}
// The problem with its numbers as variables of the tape.
template <class Real>
[[nodiscard]] Problem<Var<Real>> record(Tape<Real>& tape, const Problem<Real>& problem) {
  Problem<Var<Real>> taped = cast_problem<Var<Real>>(problem);
  for (auto* tensor : {&taped.query, &taped.key, &taped.value, &taped.extra, &taped.bias,
                       &taped.query_inputs, &taped.key_inputs})
    record(tape, tensor->data(), Index(tensor->size()));
  return taped;
}

template <class Real>
[[nodiscard]] std::vector<Real> read(const std::vector<Real>& adjoint, const Var<Real>* numbers,
                                     Index count) {
  std::vector<Real> gradient;
  for (Index i = 0; i < count; ++i) gradient.push_back(adjoint[std::size_t(numbers[i].index)]);
  return gradient;
}

// sum(out o grad_out) + sum(lse o grad_lse) + sum(steps o grad_steps)
template <class Real>
[[nodiscard]] Var<Real> loss_of(const Result<Var<Real>>& result, const std::vector<Real>& grad_out,
                                const std::vector<Real>& grad_lse,
                                const std::vector<Real>& grad_steps) {
  const std::vector<Var<Real>>& out = result.out;
  Var<Real> loss = math::dot_product(
      Index(out.size()), [&](Index n) { return out[std::size_t(n)]; },
      [&](Index n) { return Var<Real>(grad_out[std::size_t(n)]); });
  // grad_lse is (batch, heads, len_q, maps); the lse of a row that sees no key is constant.
  const std::size_t maps = result.lse.size();
  for (std::size_t n = 0; n < grad_lse.size(); ++n) {
    const Var<Real>& lse = result.lse[n % maps][n / maps];
    if (std::isfinite(lse.value)) loss += lse * Var<Real>(grad_lse[n]);
  }
  require(grad_steps.empty() || grad_steps.size() == result.steps.size(),
          "reference::gradients: grad_steps has ", grad_steps.size(), " numbers, steps has ",
          result.steps.size());
  for (std::size_t n = 0; n < grad_steps.size(); ++n)
    loss += result.steps[n] * Var<Real>(grad_steps[n]);
  return loss;
}

// The gradients of the parameters of `taped`, as an op like `op`.
template <class Op, class TapedOp, class Real>
[[nodiscard]] Op read_params(const std::vector<Real>& adjoint, const Op& op, TapedOp& taped) {
  std::vector<Param<Real>> gradients;
  taped.visit([&](const char*, Param<Var<Real>>& p) {
    gradients.push_back(p.given() ? Param<Real>(p.shape(), read(adjoint, p.data(), p.size()))
                                  : Param<Real>());
  });
  Op result = op;
  std::size_t next = 0;
  result.visit([&](const char*, Param<Real>& p) { p = std::move(gradients[next++]); });
  return result;
}

}  // namespace detail

// Gradients by the tape: one forward pass over Var<Real>, Real = float or double.
template <class Op>
[[nodiscard]] Gradients<Op> gradients(const Op& op, const Problem<typename Op::Scalar>& problem,
                                      const std::vector<typename Op::Scalar>& grad_out,
                                      const std::vector<typename Op::Scalar>& grad_lse = {},
                                      const std::vector<typename Op::Scalar>& grad_steps = {}) {
  using Real = typename Op::Scalar;
  const Geometry& g = problem.geometry;
  require(Index(grad_out.size()) == g.query_rows() * g.dim_v, "reference::gradients: grad_out has ",
          grad_out.size(), " numbers, out has ", g.query_rows() * g.dim_v);
  require(grad_lse.empty() || Index(grad_lse.size()) == g.query_rows() * Op::NormaliserType::maps,
          "reference::gradients: grad_lse has ", grad_lse.size(), " numbers, lse has ",
          g.query_rows() * Op::NormaliserType::maps);
  op.validate(g, "reference::gradients");

  Tape<Real> tape;
  Problem<Var<Real>> taped = detail::record(tape, problem);
  auto taped_op = cast_whole_op<Var<Real>>(op);
  taped_op.visit(
      [&](const char*, Param<Var<Real>>& p) { detail::record(tape, p.data(), p.size()); });

  const std::vector<Real> adjoint = tape.gradient(
      detail::loss_of(reference::forward(taped_op, taped), grad_out, grad_lse, grad_steps));
  const auto read = [&](const std::vector<Var<Real>>& tensor) {
    return detail::read(adjoint, tensor.data(), Index(tensor.size()));
  };
  return {read(taped.query),        read(taped.key),
          read(taped.value),        read(taped.extra),
          read(taped.bias),         detail::read_params(adjoint, op, taped_op),
          read(taped.query_inputs), read(taped.key_inputs)};
}

}  // namespace reference
}  // namespace HEED_ABI
}  // namespace heed
