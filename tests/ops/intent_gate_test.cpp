// SPDX-License-Identifier: Apache-2.0

// Intent gates (given, from the query, calculated), in public calls.

#include "catch.hpp"
#include "door_case.hpp"

#include <heed/check/op_gradcheck.hpp>
#include <heed/ops/intent_gate.hpp>

namespace {

using namespace heed;
using namespace heed_test;

static_assert(AttentionOp<IntentGated<float>> && AttentionOp<IntentFromQ<double>> &&
              AttentionOp<IntentCalc<float>>);
static_assert(IntentGated<float>::uses_extra && !IntentFromQ<float>::uses_extra);
static_assert(!IntentGate<float>::saves_mixed && !IntentCalculated<float>::saves_mixed);

template <class Part>
void fill_weights(Part& part, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  visit_parameters(part, [&](const char*, auto& p) {
    for (Index i = 0; i < p.size(); ++i) p[i] = typename Part::Scalar(0.5 * normal(random));
  });
}

template <class T>
IntentGated<T> given(GateGrain grain, Param<T> bias = {}) {
  IntentGated<T> op;
  op.readout.grain = grain;
  op.readout.bias = std::move(bias);
  return op;
}
template <class T>
IntentFromQ<T> from_query(const Geometry& g, GateGrain grain, Param<T> bias = {}) {
  auto op = make_intent_from_q<T>(g, grain);
  op.readout.bias = std::move(bias);
  fill_weights(op, 3);
  return op;
}
template <class T>
IntentCalc<T> calculated(const Geometry& g, GateGrain grain, Param<T> bias = {}) {
  auto op = make_intent_calculated<T>(g, grain);
  op.readout.bias = std::move(bias);
  fill_weights(op, 4);
  return op;
}

const Geometry kSmall{2, 4, 4, 2, 5, 5, 3, 6};

// Calls f(op) for each gate with every grain, with and without bias.
template <class T, class F>
void for_each_gate(const Geometry& g, F&& f) {
  for (const GateGrain grain : {GateGrain::elementwise, GateGrain::per_head}) {
    f(given<T>(grain));
    f(given<T>(grain, Param<T>(T(0.7))));
    f(from_query<T>(g, grain));
    f(from_query<T>(g, grain, Param<T>(std::vector<Index>{g.heads})));
    if (g.len_q != g.len_kv) continue;
    f(calculated<T>(g, grain));
    f(calculated<T>(g, grain, Param<T>(std::vector<Index>{g.heads})));
  }
}

// Compares out and all gradients with the oracle's; with `parameters` also those of the readout.
template <class T, class Op, class Extra>
double compare_golden(const GoldenCase& c, const Op& op, Extra&& parameters) {
  auto problem = c.problem<T>();
  const auto mask = c.mask<T>();
  if (c.text("gate") != "intent") problem.extra.clear();
  const auto r = run_doors(op, problem, mask, c.rounded<T>("dout"));
  double worst = 0;
  const auto compare = [&](const auto& got, const char* name) {
    const double d = deviation(got, c.tensor(name));
    INFO(c.name() << " " << name << " " << d);
    CHECK(d < (sizeof(T) == 8 ? 1e-12 : 2e-5));
    worst = std::max(worst, d);
  };
  compare(r.out, "out");
  compare(r.grad_query, "dq");
  compare(r.grad_key, "dk");
  compare(r.grad_value, "dv");
  if (c.has("di")) compare(r.grad_extra, "di");
  compare(std::vector<T>(r.saved.lse.begin(), r.saved.lse.end()), "lse");
  parameters(r.grad_op.readout, compare);
  return worst;
}

template <class T>
double golden_case(const GoldenCase& c) {
  const std::string& gate = c.text("gate");
  if (gate == "intent")
    return compare_golden<T>(c, IntentGated<T>{}, [](const auto&, const auto&) {});
  if (gate == "from_q") {
    IntentFromQ<T> op;
    op.readout.weight = c.param<T>("Wg");
    return compare_golden<T>(
        c, op, [](const auto& d, const auto& compare) { compare(numbers(d.weight), "dWg"); });
  }
  REQUIRE(gate == "calc");
  IntentCalc<T> op;
  op.readout.query_weight = c.param<T>("Wq");
  op.readout.key_weight = c.param<T>("Wk");
  op.readout.value_weight = c.param<T>("Wv");
  return compare_golden<T>(c, op, [](const auto& d, const auto& compare) {
    compare(numbers(d.query_weight), "dWq");
    compare(numbers(d.key_weight), "dWk");
    compare(numbers(d.value_weight), "dWv");
  });
}

}  // namespace

TEST_CASE("intent gates reproduce the golden cases") {
  const auto files = golden_files(HEED_GOLDEN_DIR, "intent_");
  REQUIRE(files.size() == 11);
  for (const auto& file : files) {
    const GoldenCase c(file);
    golden_case<double>(c);
    golden_case<float>(c);
  }
}

// Two keys of equal score: mixed = (2 + 4)/2 = 3. I = ln 3, so s = 3/4 and out = 9/4. With
// dout = 2, dI = 2 * 9/4 * 1/4 = 9/8 and dmixed = 3/2, so dvalue = 3/4 each; values pull the scores
// by dmixed (v - mixed)/2 = -3/4 and 3/4, times key 1 or -1 and scale 1: dquery = -3/4 - 3/4.
TEST_CASE("a gate of three quarters, by hand") {
  reference::Problem<double> p;
  p.geometry = {1, 1, 1, 1, 1, 2, 1, 1};
  p.query = {0};
  p.key = {1, -1};
  p.value = {2, 4};
  p.extra = {std::log(3.0)};
  for (const GateGrain grain : {GateGrain::elementwise, GateGrain::per_head}) {
    const auto r = run_doors(given<double>(grain, Param<double>(0.0)), p, {}, {2.0});
    CHECK(r.out[0] == Approx(2.25));
    CHECK(r.grad_extra[0] == Approx(1.125));
    CHECK(r.grad_op.readout.bias[0] == Approx(1.125));
    CHECK(r.grad_value[0] == Approx(0.75));
    CHECK(r.grad_value[1] == Approx(0.75));
    CHECK(r.grad_query[0] == Approx(-1.5));
  }
}

// One key: mixed = v = 2. I = q Wq + k Wk + v Wv = 0.5 + 1 - 1.5 = 0, s = 1/2, out = 1. With
// dout = 4: dI = 4 * 1 * 1/2 = 2.
TEST_CASE("a calculated gate, by hand") {
  reference::Problem<double> p;
  p.geometry = {1, 1, 1, 1, 1, 1, 1, 1};
  p.query = {0.5};
  p.key = {-1};
  p.value = {2};
  auto op = make_intent_calculated<double>(p.geometry);
  op.readout.query_weight[0] = 1;
  op.readout.key_weight[0] = -1;
  op.readout.value_weight[0] = -0.75;
  const auto r = run_doors(op, p, {}, {4.0});
  CHECK(r.out[0] == Approx(1.0));
  CHECK(r.grad_op.readout.query_weight[0] == Approx(2 * 0.5));
  CHECK(r.grad_op.readout.key_weight[0] == Approx(2 * -1.0));
  CHECK(r.grad_op.readout.value_weight[0] == Approx(2 * 2.0));
  CHECK(r.grad_query[0] == Approx(2 * 1.0));
  CHECK(r.grad_key[0] == Approx(2 * -1.0));
  CHECK(r.grad_value[0] == Approx(4 * 0.5 + 2 * -0.75));  // through the mix, and through the gate
}

TEST_CASE("every gate equals its slow twin, gradients included, across panels and tiles") {
  Options small;
  small.key_tile = 1;
  small.panel_vectors = 1;
  small.threads = 2;
  for (const Index len_q : {1, 7, 37})
    for (const Index len_kv : {Index(9), len_q})
      for (const Index dim_v : {1, 6, 19}) {
        const Geometry g{2, 4, 4, 2, len_q, len_kv, 5, dim_v};
        const auto mask = causal<double>() & key_lengths<double>({len_kv, len_kv / 2});
        for_each_gate<double>(g, [&](const auto& op) {
          std::string where;
          const auto problem = random_problem<double>(g, op.extra_dim(g), 5);
          INFO(len_q << " " << len_kv << " " << dim_v << " grain " << int(op.readout.grain));
          const double whole = twin_deviation(op, problem, mask, where);
          const double tiled = twin_deviation(op, problem, mask, where, small);
          INFO(where);
          CHECK(whole < 1e-12);
          CHECK(tiled < 1e-12);
        });
      }
}

TEST_CASE("float gates stay within float rounding of the double twin") {
  const Geometry g{1, 2, 2, 1, 41, 41, 16, 24};
  for_each_gate<float>(g, [&](const auto& op) {
    std::string where;
    const double d =
        twin_deviation(op, random_problem<float>(g, op.extra_dim(g), 6), causal<float>(), where);
    INFO(where);
    CHECK(d < 2e-5);
  });
}

TEST_CASE("gate gradients agree with dual numbers") {
  for_each_gate<double>(kSmall, [&](const auto& op) {
    const auto problem = random_problem<double>(kSmall, op.extra_dim(kSmall), 8);
    const auto r = run_doors(op, problem, {}, gradcheck_grad_out(kSmall));
    using Op = std::remove_cvref_t<decltype(op)>;
    const reference::Gradients<Op> mine{r.grad_query, r.grad_key, r.grad_value,
                                        r.grad_extra, {},         r.grad_op};
    const auto report = check_op_gradient(op, problem, named_gradients(mine), Method::dual);
    INFO(report.text());
    CHECK(report.passed);
  });
}

TEST_CASE("padding lanes leave no trace in a gate's results") {
  const Geometry g{1, 2, 2, 1, 4, 4, 5, 7};
  for_each_gate<float>(g, [&](const auto& op) {
    const auto run = [&](double padding) {
      return run_hooks<std::remove_cvref_t<decltype(op.readout)>, float>(
          op.readout, g, op.extra_dim(g), kLanes<float> + 1, padding);
    };
    CHECK(run(0.0) == run(1e6));
  });
}

TEST_CASE("a saturated gate keeps the digits of both tails") {
  reference::Problem<double> p;
  p.geometry = {1, 1, 1, 1, 2, 1, 1, 1};
  p.query = {1, 1};
  p.key = {1};
  p.value = {3};
  p.extra = {40, -40};
  const auto r = run_doors(given<double>(GateGrain::elementwise), p, {}, {1.0, 1.0});
  const double tail = std::exp(-40.0);
  CHECK(r.out[0] == 3.0);
  CHECK(r.out[1] == Approx(3 * tail).epsilon(1e-14));
  CHECK(r.grad_extra[0] == Approx(3 * tail).epsilon(1e-14));  // 1 - s, not the difference 1 - 1
  CHECK(r.grad_extra[1] == Approx(3 * tail).epsilon(1e-14));
  p.extra = {1e300, -1e300};
  const auto far = run_doors(given<double>(GateGrain::elementwise), p, {}, {1.0, 1.0});
  CHECK(far.out == std::vector<double>{3, 0});
  CHECK(far.grad_extra == std::vector<double>{0, 0});
}

TEST_CASE("a row that sees no key stays zero and gives its gate no gradient") {
  const Geometry g{1, 2, 2, 1, 4, 4, 3, 5};
  for_each_gate<double>(g, [&](const auto& op) {
    const auto problem = random_problem<double>(g, op.extra_dim(g), 9);
    const auto r = run_doors(op, problem, key_lengths<double>({0}), std::vector<double>(40, 1.0));
    for (const auto* zeros : {&r.out, &r.grad_query, &r.grad_key, &r.grad_value, &r.grad_extra})
      for (const double x : *zeros) CHECK(x == 0.0);
    auto dop = r.grad_op;
    dop.visit([](const char*, const auto& p) {
      for (Index i = 0; i < p.size(); ++i) CHECK(p[i] == 0.0);
    });
  });
}

TEST_CASE("a NaN in one intent spoils its own number only") {
  const Geometry g{1, 1, 1, 1, 3, 3, 2, 4};
  auto problem = random_problem<double>(g, 4, 10);
  problem.extra[5] = std::numeric_limits<double>::quiet_NaN();  // row 1, column 1
  const auto r =
      run_doors(given<double>(GateGrain::elementwise), problem, {}, std::vector<double>(12, 1.0));
  for (std::size_t n = 0; n < 12; ++n) CHECK(std::isnan(r.out[n]) == (n == 5));
  for (std::size_t n = 0; n < 12; ++n)
    if (n / 4 != 1) CHECK(std::isfinite(r.grad_extra[n]));
}

TEST_CASE("weights of zero leave every gate half open, and a bias opens it") {
  const Geometry g{1, 2, 2, 2, 3, 3, 4, 4};
  const auto problem = random_problem<double>(g, 0, 11);
  const std::vector<double> grad_out(24, 1.0);
  const auto plain = reference::forward(make_intent_from_q<double>(g), problem);
  auto op = make_intent_calculated<double>(g);
  const auto half = run_doors(op, problem, {}, grad_out);
  op.readout.bias = Param<double>{std::log(3.0), 100.0};
  const auto open = run_doors(op, problem, {}, grad_out);
  for (std::size_t n = 0; n < 24; ++n) {
    CHECK(half.out[n] == Approx(plain.mixed[n] / 2));
    CHECK(open.out[n] == Approx(plain.mixed[n] * (n < 12 ? 0.75 : 1.0)));
  }
}

TEST_CASE("gates refuse what does not fit in one sentence") {
  const Geometry g{1, 2, 2, 1, 4, 4, 3, 5};
  const auto refused = [&](const auto& op, Index extra, const std::string& text) {
    try {
      run_doors(op, random_problem<double>(g, extra, 1), {}, std::vector<double>(40, 1.0));
      FAIL("was accepted: " << text);
    } catch (const std::invalid_argument& error) {
      INFO(error.what());
      CHECK(std::string(error.what()).find(text) != std::string::npos);
    }
  };
  refused(given<double>(GateGrain::elementwise), 0, "needs the input intent");
  refused(given<double>(GateGrain::elementwise, {1.0, 2.0, 3.0}), 5, "gate.bias has 3 values");
  refused(given<double>(GateGrain::elementwise, Param<double>(double(NAN))), 5, "gate.bias is nan");
  refused(given<double>(GateGrain(7)), 1, "grain is 7");
  refused(IntentFromQ<double>{}, 0, "gate.weight has shape ()");
  Geometry narrow = g;
  narrow.dim_v = 4;
  refused(from_query<double>(narrow, GateGrain::elementwise), 0,
          "gate.weight has shape (2,3,4), it must be (2,3,5)");
  auto no_value = calculated<double>(g, GateGrain::per_head);
  no_value.readout.value_weight = {};
  refused(no_value, 0, "gate.value_weight");
  Geometry cross = g;
  cross.len_kv = g.len_q - 1;  // the last query's own token is missing
  CHECK_THROWS_AS(run_doors(calculated<double>(g, GateGrain::per_head),
                            random_problem<double>(cross, 0, 1), {}, std::vector<double>(40, 1.0)),
                  std::invalid_argument);
}
