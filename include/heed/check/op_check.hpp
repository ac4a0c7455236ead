// SPDX-License-Identifier: Apache-2.0
#pragma once

// Is an op of your own right? One call, under every kind of mask:
//
//   const OpReport report = check_op(op);
//   std::puts(report.summary().c_str());      // one line, and what failed; text() has all cases
//   return report.passed() ? 0 : 1;
//
//   out         forward() against the reference, which knows score(), reference() and nothing else of the op; also lse,
//               where the normaliser differentiates_lse, and steps, where the readout gives them
//   gradients   backward() against central differences of the reference: inputs, the extra one
//               included, a bias of the mask, and parameters; the loss depends on out, on lse where
//               the normaliser differentiates_lse, and on steps where the readout gives them
//   forward     jvp() against backward(), <u, J x> = <J^T u, x> (check/jvp_check.hpp); of an op that jvp() does not take,
//   mode        the report's text() says so, and why
//   score_vjp   where the score has one: against dual numbers, on random pairs
//   finite      outputs and gradients where query and key are the same rows, and some are zero, in the op's own
//               scalar
//
// At the sizes asked for and at some beside them, under masks of every kind (check/op_cases.hpp): the report's text() says
// which ran, and why one did not. Formulas with a jump must not have one near the random inputs. A reference() that works
// on plain numbers alone says so in its signature: `requires std::is_arithmetic_v<S>`. Forward mode is then not checked.
// Errors  those of forward() at the sizes asked for. Cost: seconds at the default sizes; forward
// mode takes an eighth of the time to compile a file with this call (g++ 12 at -O1).

#include <heed/check/jvp_check.hpp>
#include <heed/check/op_cases.hpp>
#include <heed/check/op_gradcheck.hpp>
#include <heed/check/op_problem.hpp>
#include <heed/plug/check.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Compares score_vjp with dual numbers, for a pair of normal numbers.
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
        const std::string name = n == 0   ? "d.dot"
                                 : n == 1 ? "d.logit"
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

// Compares both passes of a call, which have run, with the reference.
template <class Op>
void check_call(OpCall<Op>& call, const std::string& name, const GradcheckOptions& options,
                OpReport& report) {
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

// Notes each part of the op that keeps jvp() from taking it.
template <class Op>
void note_unmoved_parts(OpReport& report) {
  constexpr JvpParts moving = jvp_parts<Op>();
  const auto add = [&](bool moves, const char* why) {
    if (!moves) report.left_out.emplace_back("forward mode", std::string("no jvp() of it: ") + why);
  };
  add(moving.transform, "transform() of its rows takes no dual numbers");
  add(moving.normaliser,
      "its normaliser has no jvp(), and reference() of it takes no dual numbers");
  add(moving.readout, "reference() of its readout takes no dual numbers");
}

// Checks that outputs and gradients are finite when query rows equal their keys and the first of
// them, and the first extra row, are zero.
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
  require_sizes(g, op.normaliser.query_heads(g.heads), "check_op");
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
    detail::run_check_call(call);
    detail::check_call(call, name, options, report);
    if constexpr (detail::jvp_parts<Exact>().all())
      report.cases.emplace_back(
          "forward mode, " + name,
          detail::check_tangents_of(call, detail::CheckDirection(call), options.max_failures,
                                    [](const auto&, const auto&) {}));
  });
  detail::note_unmoved_parts<Exact>(report);
  detail::check_meeting_rows(op, g, report);
  return report;
}

}  // namespace HEED_ABI
}  // namespace heed
