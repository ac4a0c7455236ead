// SPDX-License-Identifier: Apache-2.0
#pragma once

// Is an op of your own right? One call, under every kind of mask:
//
//   const OpReport report = check_op(op);
//   std::puts(report.text().c_str());
//   return report.passed() ? 0 : 1;
//
//   out         forward() against the slow twin, which knows score(), reference() and nothing else of the op; and lse,
//               where the normaliser differentiates_lse, and steps, where the readout gives them
//   gradients   backward() against central differences of the twin: inputs, the extra one included, a bias of the
//               mask, and parameters; the loss depends on out, on lse where the normaliser differentiates_lse, and on
//               steps where the readout gives them
//   score_vjp   where the score has one: against dual numbers, on random pairs
//   finite      outputs and gradients where query and key are the same rows, and some are zero, in the op's own
//               scalar
//
// The others in double, whatever the op's scalar. Out and gradients at the sizes asked for, and beside them
//
//   one query   of heads that share keys in groups, behind the other tokens, as in decoding
//   rectangular fewer queries than keys, likewise the last ones of their tokens
//   widths      dim_v other than dim_qk
//
// unless the sizes asked for are such, or the op refuses them (parameters of one width, say): the report's text
// says which ran, and why one did not. Formulas with a jump must not have one near the random inputs. Forward mode has a
// check of its own, check_jvp() in check/jvp_check.hpp, that ops without a derivative over dual numbers can do without.
// Errors  those of forward() at the sizes asked for. Cost: seconds at the default sizes.

#include <heed/check/op_gradcheck.hpp>
#include <heed/check/op_problem.hpp>
#include <heed/plug/check.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct OpReport {
  std::vector<std::pair<std::string, GradientReport>>
      cases;  // what was compared, and how that went
  std::vector<std::pair<std::string, std::string>> left_out;  // sizes that did not run, and why

  [[nodiscard]] bool passed() const {
    for (const auto& [name, report] : cases)
      if (!report.passed) return false;
    return true;
  }
  // A line per case and per sizes that were left out, and the verdict.
  [[nodiscard]] std::string text() const {
    std::ostringstream lines;
    for (const auto& [name, report] : cases) lines << name << ": " << report.text() << "\n";
    for (const auto& [name, why] : left_out) lines << name << ": left out, " << why << "\n";
    lines << (passed() ? "passed\n" : "FAILED\n");
    return lines.str();
  }
};

namespace detail {

// Two sequences, two heads that share keys, several tiles' worth of masks.
inline constexpr Geometry kCheckGeometry{2, 4, 4, 2, 11, 11, 6, 6};

struct CheckMask {
  std::string name;
  Mask<double> mask;
};

// Fills `bias` with numbers for `shape`, every ninth of them -infinity.
[[nodiscard]] inline Mask<double> check_bias(const Shape& shape, std::vector<double>& bias) {
  const CounterRandom random(99, 1);
  bias.resize(std::size_t(element_count(shape, "check_op")));
  for (std::size_t i = 0; i < bias.size(); ++i)
    bias[i] = i % 9 == 4 ? -std::numeric_limits<double>::infinity() : random.normal(i);
  return heed::bias<double>(TensorView<const double>(bias.data(), shape));
}

// Masks of every kind for the sizes asked for; `bias` is the memory of theirs.
[[nodiscard]] inline std::vector<CheckMask> check_masks(const Geometry& g,
                                                        std::vector<double>& bias) {
  std::vector<Index> lengths;
  for (Index b = 0; b < g.batch; ++b) lengths.push_back(std::max<Index>(1, g.len_kv - 3 * b - 1));
  return {{"no mask", {}},
          {"causal", causal<double>()},
          {"window & key lengths", window<double>(3, 2) & key_lengths<double>(lengths)},
          {"soft cap & bias",
           soft_cap<double>(2.0) & check_bias({1, g.heads, g.len_q, g.len_kv}, bias)}};
}
// Fewer for the sizes beside them, the bias shared by heads and queries.
[[nodiscard]] inline std::vector<CheckMask> few_masks(const Geometry& g,
                                                      std::vector<double>& bias) {
  return {{"no mask", {}},
          {"causal & bias",
           causal<double>(Align::bottom_right) & check_bias({g.batch, 1, 1, g.len_kv}, bias)}};
}

struct CheckSizes {
  std::string name;
  Geometry geometry;
};

// The sizes beside those asked for; what these have already is not repeated.
[[nodiscard]] inline std::vector<CheckSizes> sizes_beside(const Geometry& g, bool reads_own_rows) {
  std::vector<CheckSizes> all;
  const auto add = [&](const char* name, const Geometry& sizes) {
    std::ostringstream text;
    text << name << " (heads " << sizes.heads << ", kv_heads " << sizes.kv_heads << ", len_q "
         << sizes.len_q << ", len_kv " << sizes.len_kv << ", dim_qk " << sizes.dim_qk << ", dim_v "
         << sizes.dim_v << ")";
    all.push_back({text.str(), sizes});
  };
  if (g.len_q != 1 || g.group() < 2) {
    Geometry one = g;
    one.len_q = 1;
    if (reads_own_rows) one.len_kv = 1;
    one.first_query = std::max<Index>(0, one.len_kv - 1);
    if (g.heads == 1) {
      one.heads = 4;
      one.query_heads = 4 * g.query_heads;
    }
    if (g.group() < 2) one.kv_heads = one.heads % 2 == 0 ? one.heads / 2 : 1;
    add("one query of grouped heads", one);
  }
  if (g.len_q == g.len_kv) {
    Geometry rectangular = g;
    rectangular.len_kv = g.len_q + 5;
    rectangular.first_query = 5;
    add("rectangular", rectangular);
  }
  if (g.dim_v == g.dim_qk) {
    Geometry widths = g;
    widths.dim_v = g.dim_qk + 3;
    add("values of another width", widths);
  }
  return all;
}

// Why an op cannot run at these sizes, in its own words; empty: it can.
template <class Op>
[[nodiscard]] std::string refusal(const Op& op, const Geometry& g) {
  if constexpr (Op::ReadoutType::uses_own_rows)
    if (g.len_q != g.len_kv) return "the readout reads key and value of its own row";
  try {
    op.validate(g, "the op");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// score_vjp against dual numbers, for a pair of normal numbers.
template <class Score>
void check_pair(const Score& score, std::uint64_t stream, GradientReport& report,
                double tolerance) {
  const CounterRandom random(17, stream);
  std::uint64_t next = 0;
  PairOf<Score, double> pair, by_hand{}, by_duals{};
  ScalarsOf<Score, double> p, dp{}, dp_duals{};
  Directions<Score>::for_each_field([&](auto, double& x) { x = random.normal(next++); }, pair);
  pair.query_index = double(stream);
  pair.key_index = double(stream / 2);
  if constexpr (Score::has_table && !table_by_distance<Score>) pair.key[0] = 0;
  for (int i = 0; i < scalars_of<Score>; ++i) p[std::size_t(i)] = scalar_of<double>(score, i, 0);
  const double g = random.normal(next++);
  score.score_vjp(pair, p, g, by_hand, dp);
  differentiate_by_duals<Score>(score, pair, p, g, by_duals, dp_duals);
  Directions<Score>::for_each_field(
      [&](auto n, const double& a, const double& b) {
        const char* names[] = {"d.dot", "d.logit"};
        const std::string name = n < 2 ? names[n]
                                 : n < Directions<Score>::query
                                     ? "d.projected, d.table or d.position"
                                 : n < Directions<Score>::key ? "d.query"
                                                              : "d.key";
        note(report, {name, Index(stream), a, b}, tolerance, 20);
      },
      by_hand, by_duals);
  for (std::size_t i = 0; i < dp.size(); ++i)
    note(report, {"dp", Index(i), dp[i], dp_duals[i]}, tolerance, 20);
}

// Compares both passes of a call with the twin.
template <class Op>
void check_call(OpCall<Op>& call, const std::string& name, const GradcheckOptions& options,
                OpReport& report) {
  call.grad_out = gradcheck_grad_out(call.geometry());
  if (Op::NormaliserType::differentiates_lse) {
    call.grad_lse = spread_numbers(element_count(call.lse_shape(), "check_op"));
    call.lse.assign(call.grad_lse.size(), 0);
  }
  if (call.op.readout.without_steps() == nullptr) {
    call.grad_steps = spread_numbers(call.geometry().query_rows());
    call.steps.assign(call.grad_steps.size(), 0);
  }
  call.forward();
  call.backward();
  const reference::Problem<double> problem = problem_of<double>(call);
  const reference::Result<double> slow = reference::forward(call.op, problem);
  GradientReport out;
  for (std::size_t i = 0; i < slow.out.size(); ++i)
    note(out, {"out", Index(i), call.out[i], slow.out[i]}, 1e-10, 20);
  const std::size_t maps = slow.lse.size();
  for (std::size_t i = 0; i < call.lse.size(); ++i)
    if (const double lse = slow.lse[i % maps][i / maps]; call.lse[i] != lse)
      note(out, {"lse", Index(i), call.lse[i], lse}, 1e-10, 20);
  for (std::size_t i = 0; i < call.steps.size(); ++i)
    note(out, {"steps", Index(i), call.steps[i], slow.steps[i]}, 1e-10, 20);
  report.cases.emplace_back("out, " + name, out);

  const std::vector<NamedTensor> tensors = op_tensors(call.op, problem);
  OpLoss<Op> loss{call.op, problem, call.grad_out, {}, call.grad_lse, call.grad_steps};
  for (const NamedTensor& tensor : tensors) loss.names.push_back(tensor.name);
  report.cases.emplace_back("gradients, " + name,
                            check_gradient_on<double>(loss, tensors, call.gradients(), options));
}

// body(call, name) for a call under every kind of mask, at the sizes asked for and beside them. What an op refuses is
// noted as left out of the report.
template <class Op, class Body>
void for_check_calls(const Op& op, const Geometry& g, OpReport& report, Body&& body) {
  using Columns = InputColumns<Op>;
  std::vector<double> bias;
  for (const auto& [name, mask] : check_masks(g, bias)) {
    OpCall<Op> call(op, g, mask);
    body(call, name);
  }
  if constexpr (Columns::any) {  // of one head for all
    auto numbers = normal_numbers(op, g);
    const auto keep_one = [&](std::vector<double>& inputs, Index len, Index count) {
      inputs.resize(std::size_t(g.batch * len * count));
    };
    keep_one(numbers.query_inputs, g.len_q, Columns::query);
    keep_one(numbers.key_inputs, g.len_kv, Columns::key);
    OpCall<Op> call(op, g, causal<double>(), {}, std::move(numbers));
    body(call, "numbers of tokens that all heads share");
  }
  for (const auto& [sizes, beside] : sizes_beside(g, Op::ReadoutType::uses_own_rows)) {
    const std::string why = refusal(op, beside);
    if (!why.empty()) report.left_out.emplace_back(sizes, why);
    for (const auto& [name, mask] :
         why.empty() ? few_masks(beside, bias) : std::vector<CheckMask>{}) {
      OpCall<Op> call(op, beside, mask);
      body(call, sizes + ", " + name);
    }
  }
}

// Throws unless the geometry has something to check.
inline void require_something(const Geometry& g, const char* where) {
  require(g.query_rows() > 0 && g.len_kv > 0, where, ": the geometry has batch ", g.batch,
          ", heads ", g.heads, ", len_q ", g.len_q, ", len_kv ", g.len_kv,
          "; all must be at least 1");
}

// Query rows that equal their keys, the first of them zero, and so is the first extra row: are outputs and gradients
// finite?
template <class Op>
void check_meeting_rows(const Op& op, const Geometry& g, OpReport& report) {
  using Real = typename Op::Scalar;
  OpCall<Op> call(op, g, {});
  const Index rows = std::min(g.len_q, g.len_kv), dim = g.dim_qk,
              readers = g.query_heads / g.kv_heads;
  for (Index unit = 0; unit < g.batch * g.query_heads; ++unit)
    for (Index t = 0; t < rows; ++t) {
      Real* query = call.query.data() + (unit * g.len_q + t) * dim;
      Real* key = call.key.data() + (unit / readers * g.len_kv + t) * dim;
      if (t == 0) std::fill(key, key + dim, Real(0));
      std::copy(key, key + dim, query);
    }
  if (g.query_rows() > 0)
    std::fill(call.extra.begin(), call.extra.begin() + Index(call.extra.size()) / g.query_rows(),
              Real(0));
  call.forward();
  call.backward();
  GradientReport finite;
  std::vector<NamedTensor> results = call.gradients();
  results.push_back({"out", {call.out.begin(), call.out.end()}});
  for (const NamedTensor& tensor : results) {
    for (std::size_t i = 0; i < tensor.values.size(); ++i)
      if (!std::isfinite(tensor.values[i]))
        note(finite, {tensor.name, Index(i), tensor.values[i], 0}, 0, 4);
    ++finite.checked;
  }
  report.cases.emplace_back("finite", finite);
}

}  // namespace detail

// At most `options.max_entries_per_tensor` entries of each gradient, spread evenly; 0 checks all.
template <AttentionOp Op>
[[nodiscard]] OpReport check_op(const Op& op, const Geometry& g = detail::kCheckGeometry,
                                GradcheckOptions options = {.max_entries_per_tensor = 8}) {
  static_assert(check_attention_op<Op>());
  require_sizes(op, g, "check_op");
  detail::require_something(g, "check_op");
  const auto exact = cast_op<double>(op);
  using Exact = std::remove_const_t<decltype(exact)>;
  using Score = typename Exact::ScoreType;
  OpReport report;
  if constexpr (HasScoreVjp<Score, double> && !Score::plain) {
    GradientReport pairs;
    exact.validate(g, "heed::check_op");
    for (std::uint64_t i = 0; i < 20; ++i) detail::check_pair<Score>(exact.score, i, pairs, 1e-10);
    report.cases.emplace_back("score_vjp", pairs);
  }
  detail::for_check_calls(exact, g, report, [&](OpCall<Exact>& call, const std::string& name) {
    detail::check_call(call, name, options, report);
  });
  detail::check_meeting_rows(op, g, report);
  return report;
}

}  // namespace HEED_ABI
}  // namespace heed
