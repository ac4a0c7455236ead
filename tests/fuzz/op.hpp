// SPDX-License-Identifier: Apache-2.0
#pragma once

// An op of one case behind one type: how heed runs it in float and double, its reference, and its
// formula in plain loops. Numbers leave as double, in (batch, heads, len, dim) order.

#include <heed/check/op_call.hpp>
#include <heed/check/op_gradcheck.hpp>
#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>

#include "fuzz/draw.hpp"
#include "fuzz/plain.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fuzz {

// The inputs of an op.
template <class T>
struct EngineCall {
  heed::CallViews<T> tensors;
  heed::Mask<T> mask;
  heed::Options options;
  bool backward = true;
};
// The results of an op beside the tensors; lse [map][row].
struct EngineResult {
  std::vector<std::vector<double>> lse, reports, params;
  std::vector<double> mixed;  // rows before the readout, where it saves them
};

// dL/dsteps of ops that give steps, exact in float.
[[nodiscard]] inline std::vector<float> grad_of_steps(Index rows) {
  const std::vector<double> numbers = heed::detail::spread_numbers(rows);
  return {numbers.begin(), numbers.end()};
}

struct TwinResult {
  std::vector<double> out;
  std::vector<std::vector<double>> reports;
  // Gradients of query, key, value, extra and bias, and of the parameters.
  std::vector<std::vector<double>> inputs, params;
};

class AnyOp {
 public:
  virtual ~AnyOp() = default;

  std::string settings;
  bool plain_rows = true;        // out equals the mixed rows
  bool reads_query = false;      // the readout reads the query, also in rows that see no key
  bool reads_own_rows = false;   // the readout reads key and value past the mask
  bool softmax_rows = false;     // a visible score of -infinity has its defined meaning
  bool terms_known = false;      // the plain loops' terms hold for out behind the readout, too
  bool reads_squares = false;    // the score has |q - k|^2 in it, and a parameter as its factor
  bool reads_positions = false;  // a parameter is the factor of a distance of positions
  bool linear_rows = false;      // all keys have gradients of one size, whatever their weights
  bool short_rows = false;       // a cosine divides by the length of query and key
  bool steep_zeros = false;      // the gradient of a row of zeros is 1e8 times that of others
  int maps = 1;
  // Bounds for Precision::mixed: the largest change of a score, beside that of its logit, by a relative error of sum_c |q_c
  // k_c|, and the change of weights with scores. The ops' headers have these bounds.
  double mixed_per_product = 0;               // times sum_c |q_c k_c|
  double mixed_slope = 0, mixed_largest = 0;  // for the cosine: slope, and limit of the change
  double mixed_flow = 1;

  [[nodiscard]] virtual std::vector<std::string> param_names() const = 0;
  [[nodiscard]] virtual std::vector<std::vector<double>> params() const = 0;
  [[nodiscard]] virtual EngineResult run(const EngineCall<float>& call) const = 0;
  [[nodiscard]] virtual EngineResult run(const EngineCall<double>& call) const = 0;
  // The reference over float and over double.
  [[nodiscard]] virtual TwinResult twin(const heed::reference::Problem<double>& problem,
                                        const std::vector<double>& grad_out,
                                        bool in_float) const = 0;
  [[nodiscard]] virtual PlainResult<double> plain(const Plain<double>& problem) const = 0;
  [[nodiscard]] virtual PlainResult<Dual> plain(const Plain<Dual>& problem) const = 0;
};

// Op over double, its numbers exact in float; Formula its plain loops.
template <class Op, class Formula>
class OpOf final : public AnyOp {
 public:
  OpOf(Op op, Formula formula) : op_(std::move(op)), formula_(std::move(formula)) {
    using Readout = typename Op::ReadoutType;
    plain_rows = Readout::identity;
    reads_query = Readout::uses_query;
    reads_own_rows = Readout::uses_own_rows;
    maps = Op::NormaliserType::maps;
  }

  [[nodiscard]] std::vector<std::string> param_names() const override {
    std::vector<std::string> names;
    Op copy = op_;
    copy.visit([&](const char* name, auto&) { names.push_back(name); });
    return names;
  }
  [[nodiscard]] std::vector<std::vector<double>> params() const override { return numbers_of(op_); }
  [[nodiscard]] EngineResult run(const EngineCall<float>& call) const override {
    return run_on(heed::cast_op<float>(op_), call);
  }
  [[nodiscard]] EngineResult run(const EngineCall<double>& call) const override {
    return run_on(op_, call);
  }
  [[nodiscard]] TwinResult twin(const heed::reference::Problem<double>& problem,
                                const std::vector<double>& grad_out, bool in_float) const override {
    if (in_float)
      return twin_on(heed::reference::cast_whole_op<float>(op_),
                     heed::reference::cast_problem<float>(problem), grad_out);
    return twin_on(op_, problem, grad_out);
  }
  [[nodiscard]] PlainResult<double> plain(const Plain<double>& problem) const override {
    return plain_attention(formula_, problem);
  }
  [[nodiscard]] PlainResult<Dual> plain(const Plain<Dual>& problem) const override {
    return plain_attention(formula_, problem);
  }

 private:
  template <class Any>
  [[nodiscard]] static std::vector<std::vector<double>> numbers_of(Any op) {
    std::vector<std::vector<double>> all;
    op.visit([&](const char*, auto& p) { all.emplace_back(p.data(), p.data() + p.size()); });
    return all;
  }
  template <class T>
  [[nodiscard]] static std::vector<double> widen(const std::vector<T>& x) {
    return {x.begin(), x.end()};
  }

  template <class Any, class T>
  [[nodiscard]] static EngineResult run_on(const Any& op, const EngineCall<T>& call) {
    EngineResult result;
    heed::OpCall<Any> run(op, call.tensors, call.mask, call.options);
    const std::vector<float> dsteps = grad_of_steps(run.geometry().query_rows());
    const bool gives_steps = op.readout.without_steps() == nullptr;
    if (gives_steps) {
      run.steps.assign(dsteps.size(), T(7));
      run.grad_steps.assign(dsteps.begin(), dsteps.end());
    }
    run.forward();
    const std::vector<T>& lse = run.saved.lse;
    const Index maps = Any::NormaliserType::maps, rows = Index(lse.size()) / maps;
    for (Index m = 0; m < maps; ++m)
      result.lse.emplace_back(lse.begin() + m * rows, lse.begin() + (m + 1) * rows);
    result.mixed = widen(run.saved.mixed);
    for (const auto& report : run.saved.diagnostics) result.reports.push_back(widen(report));
    if (gives_steps) result.reports.push_back(widen(run.steps));
    if (!call.backward) return result;
    run.backward();
    result.params = numbers_of(run.grad_op);
    return result;
  }

  template <class Any, class T>
  [[nodiscard]] static TwinResult twin_on(const Any& op, const heed::reference::Problem<T>& problem,
                                          const std::vector<double>& grad_out) {
    const auto forward = heed::reference::forward(op, problem);
    TwinResult result{widen(forward.out), forward.diagnostics, {}, {}};
    const std::vector<float> dsteps = grad_of_steps(Index(forward.steps.size()));
    const auto g =
        heed::reference::gradients(op, problem, std::vector<T>(grad_out.begin(), grad_out.end()),
                                   {}, std::vector<T>(dsteps.begin(), dsteps.end()));
    for (const auto* tensor : {&g.dquery, &g.dkey, &g.dvalue, &g.dextra, &g.dbias})
      result.inputs.push_back(widen(*tensor));
    result.params = numbers_of(g.op);
    return result;
  }

  Op op_;
  Formula formula_;
};

template <class Op, class Formula>
[[nodiscard]] std::unique_ptr<AnyOp> make_op(Op op, Formula formula, std::string settings = "") {
  auto made = std::make_unique<OpOf<Op, Formula>>(std::move(op), std::move(formula));
  made->settings = std::move(settings);
  return made;
}

// One value, or one per head, in [low, high).
[[nodiscard]] inline heed::Param<double> draw_param(Draw& draw, const Sizes& s, double low,
                                                    double high) {
  const Index count = s.heads > 0 && draw.chance(0.5) ? s.heads : 1;
  std::vector<double> values;
  for (Index i = 0; i < count; ++i) values.push_back(draw.number(low, high));
  return heed::Param<double>({count}, values);
}
[[nodiscard]] inline double largest_of(const heed::Param<double>& p) {
  double top = 0;
  for (Index i = 0; i < p.size(); ++i) top = std::max(top, std::abs(p[i]));
  return top;
}
// Normal numbers of standard deviation `spread`.
[[nodiscard]] inline heed::Param<double> draw_tensor(Draw& draw, const std::vector<Index>& shape,
                                                     double spread) {
  heed::Param<double> p(shape);
  for (Index i = 0; i < p.size(); ++i) p[i] = double(float(spread * draw.normal()));
  return p;
}

// An op drawn for sizes, which it may change to sizes that it accepts.
struct OpEntry {
  const char* name;
  Index cost;  // cost of a pair, plain attention being 1
  std::unique_ptr<AnyOp> (*draw)(Draw& draw, Sizes& sizes);
};
// All entries; the list is in ops.cpp.
[[nodiscard]] const std::vector<OpEntry>& op_list();

std::unique_ptr<AnyOp> draw_sdpa(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_dar(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_dar_converged(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_differential(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_differential_v1(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_differential_v2(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_intent(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_intent_from_q(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_intent_calculated(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_ode(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_ode_equilibrium(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_prototype(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_dialectical(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_recency(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_bump(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_apart(Draw& draw, Sizes& sizes);
std::unique_ptr<AnyOp> draw_own_parts(Draw& draw, Sizes& sizes);

}  // namespace fuzz
