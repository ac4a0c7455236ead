// SPDX-License-Identifier: Apache-2.0
#pragma once

// One golden operator case through the engine, in double against the stored numbers, and in float
// against the reference in double on the rounded inputs.

#include "report.hpp"

#include <heed/check/op_call.hpp>
#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>

#include <functional>
#include <map>

namespace heed_test {

// Options that cross many tile borders at the lengths of the cases.
inline heed::Options small_tiles() {
  heed::Options options;
  options.key_tile = 16;
  options.panel_vectors = 1;
  options.threads = 2;
  return options;
}

// The case, rounded to the op's scalar, after both passes.
template <class Op>
[[nodiscard]] heed::OpCall<Op> run_engine(const Op& op, const GoldenCase& golden,
                                          heed::Options options = {}) {
  using T = typename Op::Scalar;
  const auto bias = golden.rounded_if_any<T>("bias");
  options.scale = golden.number("scale");
  heed::CallNumbers<T> numbers{golden.rounded<T>("q"),
                               golden.rounded<T>("k"),
                               golden.rounded<T>("v"),
                               {},
                               golden.rounded<T>("dout")};
  if (op.extra_dim(golden.geometry()) > 0) numbers.extra = golden.rounded<T>("i");
  heed::OpCall<Op> call(op, golden.geometry(), golden.mask<T>(bias), options, std::move(numbers));
  call.forward();
  call.backward();
  call.mask.bias = {};  // its numbers are freed here
  return call;
}

// The weights of the fast path: its output where the values are the unit vectors.
template <class Op>
[[nodiscard]] std::vector<typename Op::Scalar> engine_weights(const Op& op,
                                                              const GoldenCase& golden) {
  using T = typename Op::Scalar;
  using Mixer =
      heed::Attention<T, typename Op::ScoreType, typename Op::NormaliserType, heed::Identity<T>>;
  heed::Geometry g = golden.geometry();
  g.dim_v = g.len_kv;
  std::vector<T> unit(std::size_t(g.batch * g.kv_heads * g.len_kv * g.len_kv), T(0));
  for (Index n = 0; n < g.batch * g.kv_heads * g.len_kv; ++n)
    unit[std::size_t(n * g.len_kv + n % g.len_kv)] = T(1);
  std::vector<T> unused(std::size_t(g.query_rows() * g.len_kv));  // dL/dout
  Mixer mixer;
  mixer.score = op.score;
  mixer.normaliser = op.normaliser;
  heed::Options options;
  options.scale = golden.number("scale");
  const auto bias = golden.rounded_if_any<T>("bias");
  heed::OpCall<Mixer> call(
      mixer, g, golden.mask<T>(bias), options,
      {golden.rounded<T>("q"), golden.rounded<T>("k"), std::move(unit), {}, std::move(unused)});
  call.infer();
  return call.out;
}

// Golden names of an op's parameters, keyed by the library's.
using ParamNames = std::map<std::string, std::string>;

// Size of the terms that dq and dk are sums of: scale * sum_j w_ij (|X_ij| + |delta_i|) |k_j|, and the
// same over queries. Where a row attends to one key alone they cancel almost wholly.
struct GradientTerms {
  double query = 0, key = 0;
};

template <class Op>
[[nodiscard]] GradientTerms gradient_terms(const Op& op, const GoldenCase& golden) {
  const auto problem = golden.problem<double>();
  const heed::Geometry g = golden.geometry();
  heed::reference::Request request;
  request.weights = true;
  const std::vector<double> w = heed::reference::forward(op, problem, request).weights;
  const std::vector<double>& dout = golden.tensor("dout");
  const auto largest_of = [](const double* row, Index dim) {
    double top = 0;
    for (Index c = 0; c < dim; ++c) top = std::max(top, std::abs(row[c]));
    return top;
  };
  GradientTerms terms;
  std::vector<double> of_key(std::size_t(g.batch * g.kv_heads * g.len_kv), 0.0);
  for (Index row = 0; row < g.query_rows(); ++row) {
    const Index h = row / g.len_q % g.heads, b = row / g.len_q / g.heads;
    const Index kv = (b * g.kv_heads + g.kv_head(h)) * g.len_kv;
    std::vector<double> x;
    double delta = 0, of_query = 0;
    for (Index j = 0; j < g.len_kv; ++j) {
      double sum = 0;
      for (Index c = 0; c < g.dim_v; ++c)
        sum += std::abs(dout[std::size_t(row * g.dim_v + c)] *
                        problem.value[std::size_t((kv + j) * g.dim_v + c)]);
      x.push_back(sum);
      delta += std::abs(w[std::size_t(row * g.len_kv + j)]) * sum;
    }
    const double q_top = largest_of(problem.query.data() + row * g.dim_qk, g.dim_qk);
    for (Index j = 0; j < g.len_kv; ++j) {
      const double term =
          std::abs(w[std::size_t(row * g.len_kv + j)]) * (x[std::size_t(j)] + delta);
      of_query += term * largest_of(problem.key.data() + (kv + j) * g.dim_qk, g.dim_qk);
      of_key[std::size_t(kv + j)] += term * q_top;
    }
    terms.query = std::max(terms.query, *problem.scale * of_query);
  }
  terms.key = *problem.scale * Report::largest(of_key);
  return terms;
}

template <class Op>
void check_double(const Op& op, const GoldenCase& golden, const ParamNames& names, Report& report,
                  const GradientTerms& terms, const heed::Options& options, const char* tag) {
  const auto r = run_engine(op, golden, options);
  report.exact(tag + std::string("out"), r.out, golden.tensor("out"));
  report.exact(tag + std::string("dq"), r.grad_query, golden.tensor("dq"), terms.query);
  report.exact(tag + std::string("dk"), r.grad_key, golden.tensor("dk"), terms.key);
  report.exact(tag + std::string("dv"), r.grad_value, golden.tensor("dv"));
  if (golden.has("di")) report.exact(tag + std::string("di"), r.grad_extra, golden.tensor("di"));
  if (golden.has("dbias"))
    report.exact(tag + std::string("dbias"), r.grad_bias, golden.tensor("dbias"));
  heed::for_each_param(r.grad_op, [&](const char* name, const heed::Param<double>& p) {
    const auto found = names.find(name);
    if (found == names.end()) return;
    const std::vector<double> got(p.data(), p.data() + p.size());
    report.exact(tag + found->second, got, golden.tensor(found->second));
  });
}

inline std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// The float rules of the contract. `out` of a plain readout is judged element by element; all tensors may err by the larger
// of 4 eps (16 + 4 S) of their largest number and three times the error of the reference in float.
template <class Op32>
class FloatCheck {
 public:
  // `steepness`: the factor by which a rounding of the score's inputs grows in the score, beside S.
  FloatCheck(const Op32& op, const GoldenCase& golden, const ParamNames& names,
             const GradientTerms& terms, double steepness, Report& report)
      : op_(op), golden_(golden), names_(names), terms_(terms), report_(report), s_(steepness) {}

  void run() {
    namespace ref = heed::reference;
    const auto narrow = golden_.problem<float>();
    const auto wide = ref::cast_problem<double>(narrow);
    const auto twin = heed::cast_op<double>(op_);
    ref::Request request;
    request.error_scale = true;
    const auto want = ref::forward(twin, wide, request);
    const auto naive = ref::forward(op_, narrow);
    s_ += Report::largest(want.error_scale.s_row);
    const auto got = run_engine(op_, golden_);
    judge("out", got.out, want.out, naive.out, 2.0);
    if constexpr (Op32::ReadoutType::identity) judge_elements(got.out, want);
    const auto dout = golden_.rounded<float>("dout");
    const auto exact = ref::gradients(twin, wide, widened(dout));
    const auto rough = ref::gradients(op_, narrow, dout);
    judge("dq", got.grad_query, exact.dquery, rough.dquery, 3.0, terms_.query);
    judge("dk", got.grad_key, exact.dkey, rough.dkey, 3.0, terms_.key);
    judge("dv", got.grad_value, exact.dvalue, rough.dvalue, 3.0);
    judge("di", got.grad_extra, exact.dextra, rough.dextra, 3.0);
    judge("dbias", got.grad_bias, exact.dbias, rough.dbias, 3.0);
    const auto g = params(got.grad_op), e = params(exact.op), n = params(rough.op);
    for (const auto& [name, values] : g) {
      const auto& naive_values = n.at(name);
      judge(name, std::vector<float>(values.begin(), values.end()), e.at(name),
            std::vector<float>(naive_values.begin(), naive_values.end()), 3.0, 0,
            [&, name = name] { return naive_error_nearby(name, dout); });
    }
  }

 private:
  static constexpr double eps_ = std::numeric_limits<float>::epsilon();

  template <class Op>
  [[nodiscard]] std::map<std::string, std::vector<double>> params(const Op& op) const {
    std::map<std::string, std::vector<double>> all;
    heed::for_each_param(op, [&](const char* name, const auto& p) {
      const auto found = names_.find(name);
      if (found != names_.end())
        all[found->second] = std::vector<double>(p.data(), p.data() + p.size());
    });
    return all;
  }

  template <class T>
  [[nodiscard]] static double largest_error(const std::vector<T>& got,
                                            const std::vector<double>& want) {
    double error = 0;
    for (std::size_t i = 0; i < want.size() && i < got.size(); ++i)
      if (std::isfinite(want[i])) error = std::max(error, std::abs(double(got[i]) - want[i]));
    return error;
  }

  // The naive loop's largest error in a parameter's gradient over eight cases whose rows lie a rounding away. Such a gradient
  // is one number, whose error in one case is random.
  [[nodiscard]] double naive_error_nearby(const std::string& name,
                                          const std::vector<float>& dout) const {
    namespace ref = heed::reference;
    double error = 0;
    for (std::uint64_t draw = 1; draw <= 8; ++draw) {
      auto near = golden_.problem<float>();
      const heed::CounterRandom random(draw);
      std::uint64_t n = 0;
      for (std::vector<float>* rows : {&near.query, &near.key})
        for (float& x : *rows) x *= float(1 + (random.uniform(n++) < 0.5 ? -eps_ : eps_));
      const auto exact = ref::gradients(heed::cast_op<double>(op_), ref::cast_problem<double>(near),
                                        widened(dout));
      const auto naive = ref::gradients(op_, near, dout);
      error = std::max(error, largest_error(params(naive.op).at(name), params(exact.op).at(name)));
    }
    return error;
  }

  // `nearby` gives the naive loop's largest error in inputs close by. Where its own error, times the factor, does not
  // suffice, the engine may be as wrong as that, and no more.
  void judge(
      const std::string& name, const std::vector<float>& got, const std::vector<double>& want,
      const std::vector<float>& naive, double factor, double terms = 0,
      const std::function<double()>& nearby = [] { return 0.0; }) {
    const double top = Report::largest(want);
    const double rule = 4 * eps_ * (16 + 4 * s_) * top + 16 * eps_ * terms;
    // Sums of both signs may cancel to nothing: 5e-6 absolute, as the oracle's notes advise.
    double allowed = std::max({rule, factor * largest_error(naive, want) + 4 * eps_ * top, 5e-6});
    if (largest_error(got, want) > allowed) allowed = std::max(allowed, nearby() + 4 * eps_ * top);
    report_.rounded(name, got, want, std::vector<double>(want.size(), allowed));
  }

  void judge_elements(const std::vector<float>& got, const heed::reference::Result<double>& want) {
    const auto& scale = want.error_scale;
    const Index dim = golden_.geometry().dim_v;
    std::vector<double> allowed(got.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      allowed[i] =
          eps_ * (16 + 4 * scale.s_row[i / std::size_t(dim)]) * scale.weighted_abs_value[i];
    report_.rounded("out by element", got, want.out, allowed);
  }

  const Op32& op_;
  const GoldenCase& golden_;
  const ParamNames& names_;
  GradientTerms terms_;
  Report& report_;
  double s_ = 0;
};

// build.template operator()<T>() returns the op over T.
template <class Build>
void check_operator(const GoldenCase& golden, const ParamNames& names, Report& report,
                    const Build& build, double steepness = 0) {
  const auto op = build.template operator()<double>();
  // Differential V2 aside, every query head is an output head; no golden case has that variant.
  const GradientTerms terms = gradient_terms(op, golden);
  check_double(op, golden, names, report, terms, {}, "");
  check_double(op, golden, names, report, terms, small_tiles(), "small tiles: ");
  const auto op32 = build.template operator()<float>();
  FloatCheck(op32, golden, names, terms, steepness, report).run();
}

// The same, and lse.
template <class Build>
void check_with_lse(const GoldenCase& golden, const ParamNames& names, Report& report,
                    const Build& build) {
  check_operator(golden, names, report, build);
  report.exact("lse", run_engine(build.template operator()<double>(), golden).saved.lse,
               golden.tensor("lse"));
}

void replay_sdpa(const GoldenCase& golden, Report& report);
void replay_dar(const GoldenCase& golden, Report& report);
void replay_differential(const GoldenCase& golden, Report& report);
void replay_differential_v1(const GoldenCase& golden, Report& report);
void replay_intent(const GoldenCase& golden, Report& report);
void replay_ode(const GoldenCase& golden, Report& report);
void replay_dialectical(const GoldenCase& golden, Report& report);
void replay_prototype(const GoldenCase& golden, Report& report);
void replay_art(const GoldenCase& golden, Report& report);
void replay_exclusive(const GoldenCase& golden, Report& report);
void replay_gated(const GoldenCase& golden, Report& report);
void replay_laser(const GoldenCase& golden, Report& report);
void replay_key_list(const GoldenCase& golden, Report& report);
void replay_top_k(const GoldenCase& golden, Report& report);
void replay_moba(const GoldenCase& golden, Report& report);
void replay_nsa(const GoldenCase& golden, Report& report);
void replay_dsa(const GoldenCase& golden, Report& report);
void replay_key_sink(const GoldenCase& golden, Report& report);
void replay_registers(const GoldenCase& golden, Report& report);
void replay_columns_lp(const GoldenCase& golden, Report& report);
void replay_columns_decay(const GoldenCase& golden, Report& report);

}  // namespace heed_test
