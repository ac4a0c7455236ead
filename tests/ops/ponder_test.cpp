// SPDX-License-Identifier: Apache-2.0

// Dialectical attention that halts by learnt probabilities (Halting::adaptive), and the steps that forward() reports and
// whose gradient backward() takes: by hand, against the reference, its tape and central differences, and at its limits.
//
// The number of steps of a row jumps where its probabilities add up to 1 - spare_eps. Derivatives are compared where no row
// is near such a jump: to_jump() measures it.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/jvp_check.hpp>
#include <heed/check/op_check.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

using Real = double;
using Op = Dialectical<Real>;

[[nodiscard]] double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Random parameters, with which rows halt after 1, 2, ... steps.
template <class T = double>
[[nodiscard]] Dialectical<T> random_op(const Geometry& g, int max_steps, std::uint64_t seed = 7) {
  auto op = make_dialectical<T>(g, {.max_steps = max_steps, .halting = Halting::adaptive});
  std::uint64_t stream = 0;
  op.visit([&](const char* name, Param<T>& p) {
    const CounterRandom random(seed, ++stream);
    const bool halting = std::string(name).starts_with("halt.");
    const double spread = halting ? 1.0 : 1.5 / std::sqrt(double(g.dim_qk));
    for (Index i = 0; i < p.size(); ++i) p[i] = T(spread * random.normal(std::uint64_t(i)));
  });
  for (Index h = 0; h < g.heads; ++h) op.readout.halt_bias[h] -= T(0.7);
  return op;
}

// The smallest distance, over all rows and steps, of the spent probabilities to 1 - spare_eps.
[[nodiscard]] double to_jump(const Op& op, const reference::Problem<double>& problem) {
  double nearest = 1;
  const double enough = 1 - op.readout.spare_eps;
  // p of the first n steps, by a reference that may take n steps: rho = N + R tells how much is spent
  Op fewer = op;
  for (int n = 2; n <= op.readout.max_steps; ++n) {
    fewer.readout.max_steps = n;
    const auto slow = reference::forward(fewer, problem);
    for (std::size_t r = 0; r < slow.steps.size(); ++r) {
      const double left = slow.steps[r] - slow.diagnostics[1][r];
      if (slow.diagnostics[1][r] == n) nearest = std::min(nearest, std::abs(1 - left - enough));
    }
  }
  return nearest;
}

void ask_for_steps(OpCall<Op>& call) {
  call.grad_steps = heed::detail::spread_numbers(element_count(call.steps_shape(), "test"));
  call.steps.assign(call.grad_steps.size(), 0.0);
  call.grad_out = gradcheck_grad_out(call.geometry());
}

[[nodiscard]] double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double far = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    far = std::max(far, std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i])));
  return far;
}

// Compares both passes with the reference and its tape.
void check_call(const Op& op, const Geometry& g, const Mask<double>& mask) {
  OpCall<Op> call(op, g, mask);
  ask_for_steps(call);
  call.forward();
  call.backward();
  const auto problem = heed::problem_of<double>(call);
  const auto slow = reference::forward(op, problem);
  if (op.readout.halting == Halting::adaptive) REQUIRE(to_jump(op, problem) > 1e-9);
  CHECK(farthest(call.out, slow.out) < 1e-13);
  CHECK(farthest(call.steps, slow.steps) < 1e-13);
  CHECK(farthest(call.saved.diagnostic("updates"), slow.diagnostics[1]) == 0);
  CHECK(farthest(call.saved.diagnostic("steps_used"), slow.diagnostics[1]) == 0);
  const auto exact = reference::gradients(op, problem, call.grad_out, {}, call.grad_steps);
  const std::vector<NamedTensor> wanted = named_gradients(exact), got = call.gradients();
  for (const NamedTensor& tensor : wanted) {
    INFO(tensor.name);
    const NamedTensor* own = heed::detail::find_tensor(got, tensor.name);
    REQUIRE(own != nullptr);
    CHECK(farthest(own->values, tensor.values) < 1e-12);
  }
}

}  // namespace

// u+ = 2, u- = -4, tension sigmoid(1); Su u = 0, a = z, and the gate stands at 1/2 (dialectical_test.cpp): a step takes z to
// z + sigmoid(1)/2 silu(z).
namespace {

[[nodiscard]] double after(double z) { return z + sigmoid(1) / 2 * z * sigmoid(z); }

struct OneWide {
  Op op;
  Geometry g{1, 1, 1, 1, 1, 2, 1, 1};
  std::vector<double> query{1.0}, key{0.0, 0.0}, value{1.0, 3.0}, out{0.0}, steps{0.0};

  explicit OneWide(double weight, double bias, int max_steps) {
    auto& r = op.readout;
    r.v_pos = Param<double>({1, 1}, {1.0});
    r.v_neg = Param<double>({1, 1}, {-2.0});
    r.synth = Param<double>({1, 3}, {0.5, 0.25, 1.0});
    r.synth_bias = Param<double>({1}, {0.0});
    r.gate = Param<double>({1, 1}, {0.0});
    r.gate_bias = Param<double>({1}, {0.0});
    r.halt = Param<double>({1, 1}, {weight});
    r.halt_bias = Param<double>({1}, {bias});
    r.halting = Halting::adaptive;
    r.max_steps = max_steps;
  }
  [[nodiscard]] Inputs<double> inputs() const {
    return {{query.data(), g.query_shape()},
            {key.data(), g.key_shape()},
            {value.data(), g.value_shape()}};
  }
  Saved<double> forward() {
    Saved<double> saved;
    heed::forward(op, inputs(), {},
                  {StoredView<double>(out.data(), g.out_shape()),
                   {},
                   StoredView<double>(steps.data(), Shape{1, 1, 1, 1})},
                  &saved);
    return saved;
  }
};

}  // namespace

TEST_CASE("ponder: one row by hand halts after two steps of four") {
  // h_1 = sigmoid(z_1), h_2 = sigmoid(z_2): both above 3/4, so that two steps spend more than 0.99.
  OneWide row(1.0, 0.0, 4);
  const double z1 = after(1), z2 = after(z1), h1 = sigmoid(z1);
  REQUIRE(h1 < 0.99);
  REQUIRE(h1 + sigmoid(z2) > 0.99);
  const Saved<double> saved = row.forward();
  CHECK(row.out[0] == Approx(h1 * z1 + (1 - h1) * z2).epsilon(1e-14));
  CHECK(row.steps[0] == Approx(2 + (1 - h1)).epsilon(1e-14));
  CHECK(saved.diagnostic("updates")[0] == 2.0);

  // dL/dbh of L = out + rho: dl = ((z_1 - z_2) - 1) h_1 (1 - h_1)
  std::vector<double> one{1.0};
  Op grad = row.op;
  heed::backward(row.op, row.inputs(), {}, saved, {row.out.data(), row.g.out_shape()},
                 {StoredView<const double>(one.data(), row.g.out_shape()),
                  {},
                  StoredView<const double>(one.data(), Shape{1, 1, 1, 1})},
                 {}, &grad);
  const double dl = (z1 - z2 - 1) * h1 * (1 - h1);
  CHECK(grad.readout.halt_bias[0] == Approx(dl).epsilon(1e-13));
  CHECK(grad.readout.halt[0] == Approx(dl * z1).epsilon(1e-13));
}

TEST_CASE("ponder: a step of no size halts no row before its probabilities do") {
  // Weights of 0: no step moves a row, and h = sigmoid(1) after each of them.
  const Geometry g{1, 2, 2, 2, 3, 3, 4, 4};
  OpCall<Op> call(make_dialectical<double>(g, {.max_steps = 4, .halting = Halting::adaptive}), g);
  ask_for_steps(call);
  call.forward();
  for (const double rho : call.steps) CHECK(rho == Approx(3 - sigmoid(1)).epsilon(1e-14));
  CHECK(farthest(call.out, call.query) < 1e-15);
}

TEST_CASE("ponder: the last step that may be taken has all that is left") {
  // h = sigmoid(-2) = 0.119 after each step: three steps spend 0.36.
  OneWide row(0.0, -2.0, 3);
  const double h = sigmoid(-2), z1 = after(1), z2 = after(z1), z3 = after(z2);
  const Saved<double> saved = row.forward();
  CHECK(row.out[0] == Approx(h * z1 + h * z2 + (1 - 2 * h) * z3).epsilon(1e-14));
  CHECK(row.steps[0] == Approx(3 + 1 - 2 * h).epsilon(1e-14));
  CHECK(saved.diagnostic("updates")[0] == 3.0);
}

TEST_CASE("ponder: a row halts where its probabilities reach 1 - spare_eps") {
  // h = 1/2 after each step: two steps spend 1.
  OneWide row(0.0, 0.0, 5);
  CHECK(row.forward().diagnostic("updates")[0] == 2.0);
  CHECK(row.steps[0] == 2.5);
  row.op.readout.spare_eps = 0.49;
  CHECK(row.forward().diagnostic("updates")[0] == 2.0);
  row.op.readout.spare_eps = 0.5;
  CHECK(row.forward().diagnostic("updates")[0] == 1.0);
  CHECK(row.steps[0] == 2.0);
}

TEST_CASE(
    "ponder: check_op finds out, steps and all gradients right, grouped heads and masks included") {
  const Geometry g{2, 4, 4, 2, 11, 11, 6, 6};
  const OpReport report = check_op(random_op(g, 4), g, {.max_entries_per_tensor = 12});
  INFO(report.text());
  CHECK(report.passed());
}

TEST_CASE("ponder: out, steps and gradients are those of the slow twin, under masks") {
  for (const int steps : {1, 2, 5}) {
    for (const Geometry& g : {Geometry{2, 4, 4, 2, 37, 37, 6, 6}, Geometry{1, 2, 2, 1, 5, 70, 3, 3},
                              Geometry{3, 2, 2, 2, 1, 9, 8, 8}}) {
      CAPTURE(steps, g.len_q);
      const Op op = random_op(g, steps);
      check_call(op, g, {});
      check_call(op, g, causal<double>(Align::bottom_right));
      // The first rows see no key, and recurse from a mixed row of 0.
      check_call(op, g, causal<double>(Align::top_left, -2));
    }
  }
}

TEST_CASE("ponder: rows of one call take different numbers of steps") {
  const Geometry g{2, 4, 4, 2, 37, 37, 6, 6};
  OpCall<Op> call(random_op(g, 5), g, causal<double>());
  ask_for_steps(call);
  call.forward();
  const auto& updates = call.saved.diagnostic("updates");
  CHECK(std::set<double>(updates.begin(), updates.end()).size() >= 4);
  for (std::size_t r = 0; r < updates.size(); ++r) {
    CHECK(call.steps[r] > updates[r]);
    CHECK(call.steps[r] <= updates[r] + 1);
  }
}

TEST_CASE("ponder: gradients are those of central differences of forward() itself, off the jumps") {
  const Geometry g{1, 2, 2, 1, 9, 9, 4, 4};
  const Op op = random_op(g, 4, 3);
  OpCall<Op> call(op, g, causal<double>());
  ask_for_steps(call);
  call.forward();
  call.backward();
  REQUIRE(to_jump(op, heed::problem_of<double>(call)) > 1e-4);  // h moves by 1e-5 at most
  const auto loss = [&](const Op& at, const std::vector<double>& query) {
    OpCall<Op> moved = call;
    moved.op = at;
    moved.query = query;
    moved.infer();
    double sum = 0;
    for (std::size_t i = 0; i < moved.out.size(); ++i) sum += moved.out[i] * call.grad_out[i];
    for (std::size_t i = 0; i < moved.steps.size(); ++i) sum += moved.steps[i] * call.grad_steps[i];
    return sum;
  };
  const double h = 1e-6;
  for (std::size_t i = 0; i < call.query.size(); i += 5) {
    std::vector<double> up = call.query, down = call.query;
    up[i] += h;
    down[i] -= h;
    CAPTURE(i);
    CHECK((loss(op, up) - loss(op, down)) / (2 * h) ==
          Approx(call.grad_query[i]).epsilon(1e-7).margin(1e-8));
  }
  std::vector<const Param<double>*> gradients;
  const Op& grad = call.grad_op;
  grad.visit([&](const char*, const Param<double>& p) { gradients.push_back(&p); });
  Op moved = op;
  std::size_t n = 0;
  moved.visit([&](const char* name, Param<double>& p) {
    const Param<double>& gradient = *gradients[n++];
    for (Index i = 0; i < p.size(); i += 3) {
      const double kept = p[i];
      p[i] = kept + h;
      const double up = loss(moved, call.query);
      p[i] = kept - h;
      const double down = loss(moved, call.query);
      p[i] = kept;
      CAPTURE(name, i);
      CHECK((up - down) / (2 * h) == Approx(gradient[i]).epsilon(1e-7).margin(1e-8));
    }
  });
}

TEST_CASE("ponder: forward mode moves out and steps as backward says") {
  const Geometry g{2, 4, 4, 2, 11, 11, 6, 6};
  const Op op = random_op(g, 4);
  const OpReport report = check_jvp(op, g, {.max_entries_per_tensor = 12});
  INFO(report.text());
  CHECK(report.passed());

  // <u, J x> = <J^T u, x> for a loss of steps alone, moved along the queries
  OpCall<Op> call(op, g, causal<double>());
  ask_for_steps(call);
  std::fill(call.grad_out.begin(), call.grad_out.end(), 0.0);
  call.forward();
  call.backward();
  const std::vector<double> direction = heed::detail::spread_numbers(Index(call.query.size()));
  std::vector<double> moved(call.out.size()), steps(call.steps.size()), again(call.out.size()),
      steps_again(call.steps.size()), out(call.out.size()), rho(call.steps.size());
  const StoredView<const double> along(direction.data(), g.query_shape());
  jvp(op, call.inputs(), call.mask, call.saved, call.out_view(), {along},
      {StoredView<double>(moved.data(), g.out_shape()),
       {},
       StoredView<double>(steps.data(), call.steps_shape())});
  double forwards = 0, backwards = 0;
  for (std::size_t r = 0; r < steps.size(); ++r) forwards += steps[r] * call.grad_steps[r];
  for (std::size_t i = 0; i < direction.size(); ++i) backwards += direction[i] * call.grad_query[i];
  CHECK(std::abs(backwards) > 1e-3);
  CHECK(forwards == Approx(backwards).epsilon(1e-11));
  // Without an earlier forward()
  jvp(op, call.inputs(), call.mask, {along},
      {StoredView<double>(out.data(), g.out_shape()),
       {},
       StoredView<double>(rho.data(), call.steps_shape())},
      {StoredView<double>(again.data(), g.out_shape()),
       {},
       StoredView<double>(steps_again.data(), call.steps_shape())});
  CHECK(farthest(rho, call.steps) < 1e-12);
  CHECK(farthest(steps_again, steps) < 1e-12);
}

TEST_CASE("ponder: the same bits for any number of threads, and beside a call without steps") {
  const Geometry g{2, 4, 4, 2, 150, 150, 8, 8};
  const auto op = random_op<float>(g, 5);
  OpCall<Dialectical<float>> first(op, g, causal<float>());
  const auto ask = [](OpCall<Dialectical<float>>& call) {
    call.steps.assign(std::size_t(call.geometry().query_rows()), 0.0F);
    const auto numbers = heed::detail::spread_numbers(call.geometry().query_rows());
    call.grad_steps.assign(numbers.begin(), numbers.end());
  };
  ask(first);
  first.options.threads = 1;
  first.forward();
  first.backward();
  for (const int threads : {2, 3, 7}) {
    OpCall<Dialectical<float>> other(op, g, causal<float>());
    ask(other);
    other.options.threads = threads;
    other.forward();
    other.backward();
    CHECK(other.out == first.out);
    CHECK(other.steps == first.steps);
    CHECK(other.grad_query == first.grad_query);
    CHECK(other.grad_key == first.grad_key);
    CHECK(other.grad_value == first.grad_value);
    for (Index i = 0; i < op.readout.halt.size(); ++i)
      CHECK(other.grad_op.readout.halt[i] == first.grad_op.readout.halt[i]);
  }
  OpCall<Dialectical<float>> without(op, g, causal<float>());
  without.forward();
  CHECK(without.out == first.out);
  first.grad_steps.assign(first.grad_steps.size(), 0.0F);
  first.backward();
  without.backward();
  CHECK(without.grad_query == first.grad_query);
}

TEST_CASE("ponder: a unit that never halts takes every step, one that does at once takes one") {
  const Geometry g{1, 2, 2, 2, 20, 20, 5, 5};
  Op op = random_op(g, 4);
  op.readout.halt.set_zero();
  Op by_step = op;
  by_step.readout.halting = Halting::per_token;
  by_step.readout.halt_eps = 0;
  for (const bool at_once : {false, true}) {
    for (Index h = 0; h < g.heads; ++h) op.readout.halt_bias[h] = at_once ? 800.0 : -800.0;
    by_step.readout.max_steps = at_once ? 1 : 4;
    OpCall<Op> learnt(op, g), plain(by_step, g);
    ask_for_steps(learnt);
    plain.grad_out = learnt.grad_out;
    learnt.forward();
    learnt.backward();
    plain.forward();
    plain.backward();
    CHECK(learnt.out == plain.out);
    CHECK(learnt.grad_key == plain.grad_key);
    CHECK(std::all_of(learnt.steps.begin(), learnt.steps.end(),
                      [&](double rho) { return rho == (at_once ? 2.0 : 5.0); }));
  }
}

TEST_CASE("ponder: no bit of a row depends on later tokens, nor on other sequences") {
  const Geometry g{2, 2, 2, 2, 90, 90, 6, 6};
  OpCall<Op> call(random_op(g, 5), g, causal<double>());
  ask_for_steps(call);
  call.forward();
  OpCall<Op> other = call;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Index token = 40;
  for (Index unit = 0; unit < g.batch * g.heads; ++unit)
    for (auto* x : {&other.query, &other.key, &other.value})
      for (Index t = token; t < g.len_q; ++t)
        std::fill_n(x->begin() + (unit * g.len_q + t) * 6, 6, nan);
  other.forward();
  for (Index unit = 0; unit < g.batch * g.heads; ++unit) {
    for (Index t = 0; t < token; ++t) {
      const auto row = std::size_t(unit * g.len_q + t);
      CHECK(other.steps[row] == call.steps[row]);
      for (std::size_t c = row * 6; c < row * 6 + 6; ++c) CHECK(other.out[c] == call.out[c]);
    }
    const auto spoilt = std::size_t(unit * g.len_q + token);
    CHECK(std::isnan(other.out[spoilt * 6]));
    CHECK(std::isnan(other.steps[spoilt]));
  }
}

TEST_CASE("ponder: float rows are those of the double twin on float inputs") {
  const Geometry g{1, 2, 2, 1, 70, 70, 16, 16};
  const auto op = random_op<float>(g, 3);
  OpCall<Dialectical<float>> call(op, g, causal<float>());
  call.steps.assign(std::size_t(g.query_rows()), 0.0F);
  call.forward();
  const auto slow = reference::forward(cast_op<double>(op), heed::problem_of<double>(call));
  for (std::size_t r = 0; r < call.steps.size(); ++r) {
    if (std::abs(call.saved.diagnostic("updates")[r] - slow.diagnostics[1][r]) > 0) continue;
    CHECK(call.steps[r] == Approx(slow.steps[r]).epsilon(2e-6));
    for (std::size_t c = r * 16; c < r * 16 + 16; ++c)
      CHECK(call.out[c] == Approx(slow.out[c]).epsilon(1e-5).margin(2e-5));
  }
}

TEST_CASE("ponder: steps may be stored as bfloat16 and in any layout") {
  const Geometry g{2, 2, 2, 2, 12, 12, 4, 4};
  const Op op = random_op(g, 4);
  OpCall<Op> call(op, g);
  ask_for_steps(call);
  call.forward();
  std::vector<bfloat16> narrow(call.steps.size());
  std::vector<double> out(call.out.size()), swapped(call.steps.size());
  const StoredView<double> to(out.data(), g.out_shape());
  forward(op, call.inputs(), {}, {to, {}, TensorView<bfloat16>(narrow.data(), call.steps_shape())});
  // (batch, len, heads)
  forward(op, call.inputs(), {},
          {to, {}, StoredView<double>(swapped.data(), call.steps_shape(), Strides{24, 1, 2})});
  for (Index b = 0; b < 2; ++b)
    for (Index h = 0; h < 2; ++h)
      for (Index t = 0; t < 12; ++t) {
        const double rho = call.steps[std::size_t(g.row_index(b, h, t))];
        CHECK(double(narrow[std::size_t(g.row_index(b, h, t))]) == Approx(rho).epsilon(0.004));
        CHECK(swapped[std::size_t(b * 24 + t * 2 + h)] == rho);
      }
}

namespace {

// An op whose steps are all results.
[[nodiscard]] Op outside_op(const Geometry& g, int max_steps) {
  Op op = random_op(g, max_steps);
  op.readout.halting = Halting::outside;
  op.readout.halt = op.readout.halt_bias = Param<double>();
  return op;
}

}  // namespace

TEST_CASE("ponder: with halting outside, steps are the rows of ops with fewer steps") {
  const Geometry g{2, 4, 4, 2, 37, 37, 6, 6};
  const int max_steps = 4;
  OpCall<Op> call(outside_op(g, max_steps), g, causal<double>());
  CHECK(call.steps_shape() == Shape{2, 4, 37, 18});
  ask_for_steps(call);
  call.forward();
  CHECK(call.saved.diagnostic("updates") == std::vector<double>(std::size_t(g.query_rows()), 4.0));
  for (int n = 1; n <= max_steps; ++n) {
    Op fewer = call.op;
    fewer.readout.halting = Halting::per_token;
    fewer.readout.halt_eps = 0;
    fewer.readout.max_steps = n;
    OpCall<Op> other(fewer, g, causal<double>());
    other.forward();
    std::vector<double> rows;
    for (Index r = 0; r < g.query_rows(); ++r)
      for (Index c = 0; c < 6; ++c)
        rows.push_back(n == max_steps ? call.out[std::size_t(r * 6 + c)]
                                      : call.steps[std::size_t(r * 18 + (n - 1) * 6 + c)]);
    CHECK(rows == other.out);
  }
  // A call without steps has the same rows, and a loss that reads no steps the same gradients
  OpCall<Op> without(call.op, g, causal<double>());
  without.grad_out = call.grad_out;
  without.forward();
  without.backward();
  std::fill(call.grad_steps.begin(), call.grad_steps.end(), 0.0);
  call.backward();
  CHECK(without.out == call.out);
  CHECK(without.grad_query == call.grad_query);
  CHECK(without.grad_value == call.grad_value);
}

TEST_CASE("ponder: with halting outside both passes and forward mode agree with the twin") {
  for (const int steps : {2, 5})
    for (const Geometry& g : {Geometry{2, 4, 4, 2, 37, 37, 6, 6}, Geometry{1, 2, 2, 1, 5, 70, 3, 3},
                              Geometry{3, 2, 2, 2, 1, 9, 8, 8}}) {
      CAPTURE(steps, g.len_q);
      check_call(outside_op(g, steps), g, {});
      check_call(outside_op(g, steps), g, causal<double>(Align::top_left, -2));
    }
  const Geometry g{2, 4, 4, 2, 11, 11, 6, 6};
  for (const OpReport& report : {check_op(outside_op(g, 3), g, {.max_entries_per_tensor = 12}),
                                 check_jvp(outside_op(g, 3), g, {.max_entries_per_tensor = 12})}) {
    INFO(report.text());
    CHECK(report.passed());
  }
}

TEST_CASE("ponder: no heads, no queries and no keys") {
  for (const Geometry& g : {Geometry{2, 0, 0, 1, 5, 5, 4, 4}, Geometry{2, 2, 2, 1, 0, 5, 4, 4},
                            Geometry{2, 2, 2, 1, 5, 0, 4, 4}}) {
    CAPTURE(g.heads, g.len_q, g.len_kv);
    OpCall<Op> call(random_op(g, 3), g);
    ask_for_steps(call);
    call.forward();
    call.backward();
    for (const double rho : call.steps) CHECK(rho > 1);
  }
}

TEST_CASE("ponder: what does not fit is refused in one sentence") {
  const Geometry g{1, 2, 2, 2, 5, 5, 4, 4};
  OpCall<Op> call(random_op(g, 3), g);
  ask_for_steps(call);
  call.forward();
  const auto says = [](auto&& body, const std::string& wanted) {
    CHECK(message_of(body) == wanted);
  };
  OpCall<Op> by_step = call;
  by_step.op.readout.halting = Halting::per_token;
  says(
      [&] { by_step.forward(); },
      "heed::forward: steps was given, the op's rows halt by the size of their steps; halting must "
      "be adaptive");
  by_step.steps.clear();
  by_step.forward();
  says([&] { by_step.backward(); },
       "heed::backward: grad_steps was given, the op's rows halt by the size of their steps; "
       "halting must be adaptive");
  OpCall<ScaledDot<double>> plain(ScaledDot<double>{}, g);
  plain.steps.assign(10, 0.0);
  says([&] { plain.forward(); },
       "heed::forward: steps was given, the op's readout counts no steps (plug/readout.hpp)");

  std::vector<double> steps(20);
  const auto forward_to = [&](const StoredView<double>& to) {
    forward(call.op, call.inputs(), {}, {call.out_view(), {}, to});
  };
  says(
      [&] {
        forward_to({steps.data(), Shape{1, 2, 5, 2}});
      },
      "heed::forward: steps has shape (1,2,5,2), it must be (1,2,5,1)");
  says(
      [&] {
        forward_to({call.out.data(), Shape{1, 2, 5, 1}});
      },
      "heed::forward: steps overlaps out");
  says(
      [&] {
        forward_to({call.query.data(), Shape{1, 2, 5, 1}});
      },
      "heed::forward: steps overlaps query");

  says([&] { outside_op(g, 1).validate(g, "here"); },
       "here: halting is outside, max_steps is 1, it must be at least 2");
  OpCall<Op> by_caller(outside_op(g, 4), g);
  by_caller.steps.assign(10, 0.0);
  says(
      [&] {
        forward(by_caller.op, by_caller.inputs(), {},
                {by_caller.out_view(), {}, {by_caller.steps.data(), Shape{1, 2, 5, 1}}});
      },
      "heed::forward: steps has shape (1,2,5,1), it must be (1,2,5,12)");

  Op op = call.op;
  op.readout.halt = Param<double>();
  says([&] { op.validate(g, "here"); },
       "here: halting is adaptive, halt.weight was not given; make_dialectical() makes both for a "
       "geometry");
  op = call.op;
  op.readout.halt_bias = Param<double>({1}, {0.0});
  says([&] { op.validate(g, "here"); },
       "here: halt.bias has shape (1), it must be (2) for heads of width 4, or empty");
  op = call.op;
  op.readout.spare_eps = 1;
  says([&] { op.validate(g, "here"); }, "here: spare_eps is 1, it must be in [0, 1)");
}
