// SPDX-License-Identifier: Apache-2.0

// Rows and scales of any size, where the logits are ordinary numbers: forward and backward of ops that read the
// dot product itself, in float against the reference in double.

#include "catch.hpp"
#include "door_case.hpp"

#include <heed/attention.hpp>
#include <heed/plug/own_score.hpp>

using namespace heed;
using namespace heed_test;

namespace {

constexpr Index kDim = 8;

struct Sizes {
  double query, key, scale, cap = 0;
};

// Scores that read the dot product beside the logit.
template <class T>
struct Bent {
  Param<T> factor = T(0.3);
  static constexpr auto parameters = std::tuple{named("factor", &Bent::factor)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[0] * math::tanh(S(pair.dot));
  }
};

void require_near(const std::string& name, const std::vector<float>& got,
                  const std::vector<double>& want, double tolerance, double least = 0) {
  REQUIRE(got.size() == want.size());
  double size = least;
  for (const double x : want) size = std::max(size, std::abs(x));
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO(name << "[" << i << "]: " << got[i] << ", expected " << want[i] << ", the largest is "
              << size);
    REQUIRE(std::abs(double(got[i]) - want[i]) <= tolerance * size);
  }
}

// len_q = 2 takes the way of few queries. Gradients are compared where they can be: dL/d(q.k) is about
// 1/(|q| |k|), which must be a float.
template <class Op>
void check_sizes(const Op& op, Index len_q, const Sizes& s) {
  INFO("queries " << len_q << ", |q| " << s.query << ", |k| " << s.key << ", scale " << s.scale
                  << ", cap " << s.cap);
  const Geometry g{1, 2, 2, 1, len_q, 37, kDim, kDim};
  auto problem = random_problem<float>(g, 0, 3);
  for (float& x : problem.query) x = float(double(x) * s.query);
  for (float& x : problem.key) x = float(double(x) * s.key);
  problem.scale = s.scale;
  Mask<float> mask = causal<float>(Align::bottom_right);
  mask.soft_cap = float(s.cap);
  reference::use_mask(problem, mask);
  std::vector<float> grad_out;
  for (Index n = 0; n < g.query_rows() * kDim; ++n)
    grad_out.push_back(float(std::sin(1.7 * double(n))));
  const auto fast = run_doors(op, problem, mask, grad_out);

  auto wide = reference::cast_problem<double>(problem);
  wide.scale = double(float(s.scale));
  const auto wide_op = cast_op<double>(op);
  const auto twin = reference::forward(wide_op, wide);
  auto slow =
      reference::gradients(wide_op, wide, std::vector<double>(grad_out.begin(), grad_out.end()));
  require_near("out", fast.out, twin.out, 1e-4);
  if (Op::NormaliserType::streams)
    for (std::size_t i = 0; i < fast.saved.lse.size(); ++i)
      REQUIRE(double(fast.saved.lse[i]) == Approx(twin.lse[0][i]).epsilon(1e-5).margin(1e-5));
  require_near("value", fast.grad_value, slow.dvalue, 1e-4);
  require_near("query", fast.grad_query, slow.dquery, 1e-3);
  require_near("key", fast.grad_key, slow.dkey, 1e-3);
  std::vector<std::vector<double>> expected;
  slow.op.visit([&](const char*, auto& p) { expected.push_back(numbers(p)); });
  std::size_t next = 0;
  Op dop = fast.grad_op;
  dop.visit([&](const char* name, auto& p) {
    require_near(name, numbers(p), expected[next++], 1e-3, 0.02);
  });
}

// The first `rank` unit vectors, each turned by 45 degrees into the column behind them.
Param<float> slanted_basis(Index rank) {
  Param<float> basis(std::vector<Index>{kDim, rank});
  for (Index c = 0; c < rank; ++c)
    basis[c * rank + c] = basis[(c + rank) * rank + c] = float(std::sqrt(0.5));
  return basis;
}

// Every loop that the score may run.
std::vector<Dar<float>> all_forms() {
  std::vector<Dar<float>> all;
  for (const GateKind gate : {GateKind::logistic, GateKind::centred, GateKind::tanh})
    for (const int iterations : {0, 2, 3, 5, -1})
      for (const bool adaptive : {false, true}) {
        Dar<float> op;
        op.score.gate = gate;
        op.score.converged = iterations < 0;
        op.score.iterations = std::max(iterations, 0);
        op.score.adaptive = adaptive;
        op.score.strength = {2.0F, -1.0F};
        op.score.vigilance = 0.2F;
        op.score.sharpness = 4.0F;
        op.score.feedback = {0.3F, -0.2F};
        all.push_back(op);
        if (iterations > 2) continue;
        op.score.basis = slanted_basis(3);
        all.push_back(op);
      }
  return all;
}

}  // namespace

TEST_CASE("Resonance of rows whose dot products overflow is right where their logits are numbers") {
  for (const Dar<float>& op : all_forms()) {
    INFO("gate " << int(op.score.gate) << ", iterations " << op.score.iterations
                 << (op.score.converged ? ", converged" : "")
                 << (op.score.adaptive ? ", adaptive" : "")
                 << (op.score.basis.given() ? ", low rank" : ""));
    for (const Index len_q : {2, 37}) {
      check_sizes(op, len_q, {2e19, 2e19, 1e-39});
      check_sizes(op, len_q, {1e28, 1e11, 1e-39});
      check_sizes(op, len_q, {1e11, 1e28, 1e-39});
      check_sizes(op, len_q, {2e19, 2e19, 0});
      check_sizes(op, len_q, {2e19, 2e19, 1e-38, 3});
      check_sizes(op, len_q, {1e3, 1e4, 1e-7});
      check_sizes(op, len_q, {1, 1, 0.3});
    }
  }
}

TEST_CASE(
    "The score of q = k = 2e19 at scale 1e-10 is a finite number: its logit plus its resonance") {
  const std::vector<float> x = {2e19F, 2e19F}, v = {1, 2};
  float out[2], dq[2], dk[2], lse = 0;
  const Shape row{1, 1, 1, 2};
  for (const int iterations : {0, 2, 3}) {
    Dar<float> op, grad;
    op.score.iterations = iterations;
    Inputs<float> in{{x.data(), row}, {x.data(), row}, {v.data(), row}};
    Saved<float> saved;
    Options options;
    options.scale = 1e-10;
    forward(op, in, Mask<float>(), {out, row}, &saved, options);
    lse = saved.lse[0];
    CHECK(double(lse) == Approx(8e28).epsilon(1e-6));
    CHECK(out[0] == 1);
    backward(op, in, Mask<float>(), saved, {out, row}, {v.data(), row}, {{dq, row}, {dk, row}, {}},
             &grad, options);
    for (const float g : {dq[0], dq[1], dk[0], dk[1]}) CHECK(g == 0);
    grad.visit([](const char*, auto& p) { CHECK(p[0] == 0); });
  }
}

TEST_CASE(
    "Scales of every size, down to those whose inverse overflows, give right scores and "
    "gradients") {
  Dar<float> unrolled;
  unrolled.score.iterations = 2;
  unrolled.score.strength = 2.0F;
  unrolled.score.vigilance = 0.2F;
  Dar<float> still = unrolled;
  still.score.iterations = 0;
  ResonantOde<float> ode;
  OwnAttention<Bent, float> own;
  for (const double scale : {0.0, 1e-45, -1e-45, 1e-42, 1e-39, -1e-39, 1e-38, 1e-30, 1e-20, 1e-18,
                             1e-10, 0.3, -0.3, 2.0})
    for (const Index len_q : {2, 37})
      for (const double cap : {0.0, 2.0}) {
        check_sizes(still, len_q, {1, 1, scale, cap});
        check_sizes(unrolled, len_q, {1, 1, scale, cap});
        check_sizes(ode, len_q, {1, 1, scale, cap});
        check_sizes(own, len_q, {0.5, 0.5, scale, cap});
      }
  // Large scales belong to small rows.
  for (const double scale : {1e10, 1e17, 1e20, 1e30, -1e30})
    for (const Index len_q : {2, 37}) {
      still.score.eps = unrolled.score.eps = 1e-30;
      const double size = std::sqrt(1 / std::abs(scale));
      check_sizes(still, len_q, {size, size, scale});
      check_sizes(unrolled, len_q, {size, size, scale});
      check_sizes(own, len_q, {size, size, scale});
    }
}

TEST_CASE("Rows of zeros have finite scores and gradients at every scale") {
  for (const double scale : {0.0, 1e-45, 1e-39, 1e-20, 0.3, 1e30})
    for (const Index len_q : {2, 37})
      for (const int iterations : {0, 2}) {
        INFO("scale " << scale << ", queries " << len_q << ", iterations " << iterations);
        Dar<float> op;
        op.score.iterations = iterations;
        const Geometry g{1, 1, 1, 1, len_q, 5, kDim, kDim};
        auto problem = random_problem<float>(g, 0, 4);
        std::fill_n(problem.query.begin(), kDim, 0.0F);
        std::fill_n(problem.key.begin() + kDim, kDim, 0.0F);
        problem.scale = scale;
        const std::vector<float> grad_out(problem.query.size(), 0.7F);
        const auto r = run_doors(op, problem, Mask<float>(), grad_out);
        for (const auto* tensor : {&r.out, &r.grad_query, &r.grad_key, &r.grad_value})
          for (const float x : *tensor) REQUIRE(std::isfinite(x));
      }
}
