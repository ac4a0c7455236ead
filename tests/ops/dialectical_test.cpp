// SPDX-License-Identifier: Apache-2.0

// Dialectical attention: the hooks of its readout, run panel by panel by a small driver, against
// the oracle, against the reference and its tape, and against numbers by hand.

#include "catch.hpp"
#include "golden_case.hpp"

#include <heed/autodiff/complex_step.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/reference/reference.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::deviation;
using heed_test::GoldenCase;

static_assert(AttentionOp<Dialectical<float>> && AttentionOp<Dialectical<double>>);
static_assert(!Dialectical<float>::uses_extra);

const double kSigmoidOfOne = 0.7310585786300049;

// Fixed numbers in [-1, 1).
std::vector<double> numbers(Index count, std::uint64_t seed) {
  std::vector<double> result;
  std::uint64_t state = seed * 2862933555777941757ULL + 3037000493ULL;
  for (Index n = 0; n < count; ++n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    result.push_back(double(state >> 11) * 0x1p-52 - 1.0);
  }
  return result;
}

// ---- a driver in place of the engine --------------------------------------------------------

// One panel and its memory. Memory that a hook must not read is NaN; padding lanes hold other numbers.
template <class T>
struct Panel {
  std::vector<T> tile, query, saved, dquery, delta, work, diagnostics;
  ReadoutPanel<T> hooks;

  Panel(const DialecticalReadout<T>& readout, const Geometry& g, int vectors, bool backward) {
    const Index lanes = vectors * kLanes<T>, d = g.dim_v;
    const auto make = [&](std::vector<T>& memory, Index rows, T value) -> LaneTile<T> {
      memory.assign(std::size_t(rows * lanes), value);
      return {memory.data(), rows, lanes};
    };
    const T unset = std::numeric_limits<T>::quiet_NaN();
    hooks.geometry = g;
    hooks.vectors = vectors;
    hooks.tile = make(tile, d, T(1.75));
    hooks.query = make(query, d, T(-2.5)).constant();
    hooks.saved = make(saved, d, T(0.625)).constant();
    hooks.dquery = make(dquery, d, T(0.5));
    hooks.delta = make(delta, 1, unset).data;
    hooks.work = make(work, readout.work_rows(g, backward), unset);
    hooks.diagnostics = make(diagnostics, readout.diagnostics, unset);
  }

  [[nodiscard]] Index lanes() const { return hooks.tile.lanes; }
  void place(Index b, Index h, Index first) {
    hooks.batch = b;
    hooks.head = h;
    hooks.first_row = first;
    hooks.valid_lanes = std::min(lanes(), hooks.geometry.len_q - first);
  }
  // Rows of a dense (batch, heads, len, d) tensor to and from lanes.
  void load(const std::vector<T>& tensor, std::vector<T>& lane_rows) const {
    for_elements([&](std::size_t lane, std::size_t dense) { lane_rows[lane] = tensor[dense]; });
  }
  void unload(const std::vector<T>& lane_rows, std::vector<T>& tensor) const {
    for_elements([&](std::size_t lane, std::size_t dense) { tensor[dense] = lane_rows[lane]; });
  }

 private:
  template <class Body>
  void for_elements(Body&& body) const {
    const Index d = hooks.geometry.dim_v;
    const Index row = hooks.geometry.row_index(hooks.batch, hooks.head, hooks.first_row);
    for (Index i = 0; i < hooks.valid_lanes; ++i)
      for (Index c = 0; c < d; ++c)
        body(std::size_t(c * lanes() + i), std::size_t((row + i) * d + c));
  }
};

template <class T>
struct Outcome {
  std::vector<T> out, steps_used, updates, tension;
  int steps_of_all = 0;  // for a readout that has rehearsed
  std::vector<T> dmixed, delta, dq, dk, dv;
  DialecticalReadout<T> grad;
};

template <class Body>
void for_panels(const Geometry& g, Index lanes, Body&& body) {
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index first = 0; first < g.len_q; first += lanes) body(b, h, first);
}

// The numbers of a pass that a readout's settle() needs.
template <class T>
struct Reports {
  const Outcome<T>& of;
  [[nodiscard]] const std::vector<T>& diagnostic(const std::string& name) const {
    REQUIRE(name == "updates");
    return of.updates;
  }
};

template <class T>
void run_forward(const DialecticalReadout<T>& op, const Geometry& g, int vectors,
                 const std::vector<T>& query, const std::vector<T>& mixed, Outcome<T>& result) {
  DialecticalReadout<T> readout = op;
  if (op.needs_rehearsal()) {
    Outcome<T> first;
    run_forward(op.rehearsal(), g, vectors, query, mixed, first);
    readout.settle(Reports<T>{first});
    result.steps_of_all = int(*std::max_element(first.updates.begin(), first.updates.end()));
  }
  result.out.assign(mixed.size(), T(0));
  std::vector<T>* reports[] = {&result.steps_used, &result.updates, &result.tension};
  for (auto* report : reports) report->assign(std::size_t(g.query_rows()), T(0));
  for_panels(g, vectors * kLanes<T>, [&](Index b, Index h, Index first) {
    Panel<T> p(readout, g, vectors, false);
    p.place(b, h, first);
    p.load(mixed, p.tile);
    p.load(query, p.query);
    readout.forward(p.hooks);
    p.unload(p.tile, result.out);
    for (int n = 0; n < 3; ++n)
      std::copy_n(p.hooks.diagnostics.row(n), p.hooks.valid_lanes,
                  reports[n]->begin() + g.row_index(b, h, first));
  });
}

template <class T>
void run_vjp(const DialecticalReadout<T>& op, const Geometry& g, int vectors,
             const std::vector<T>& query, const std::vector<T>& mixed, const std::vector<T>& dout,
             Outcome<T>& result) {
  DialecticalReadout<T> readout = op;
  if (op.needs_rehearsal()) readout.settle(Reports<T>{result});
  result.grad = readout;
  visit_parameters(result.grad, [](const char*, Param<T>& p) { p.set_zero(); });
  result.dq.assign(mixed.size(), T(0));
  result.dmixed.assign(mixed.size(), T(0));
  result.delta.assign(std::size_t(g.query_rows()), T(0));
  for_panels(g, vectors * kLanes<T>, [&](Index b, Index h, Index first) {
    Panel<T> p(readout, g, vectors, true);
    p.place(b, h, first);
    p.load(dout, p.tile);
    p.load(query, p.query);
    p.load(mixed, p.saved);
    readout.vjp(p.hooks, result.grad);
    p.unload(p.tile, result.dmixed);
    p.unload(p.dquery, result.dq);  // added to the 0.5 that was there
    std::copy_n(p.delta.data(), p.hooks.valid_lanes,
                result.delta.begin() + g.row_index(b, h, first));
  });
  for (T& x : result.dq) x -= T(0.5);
}

// dq, dk, dv through mixed = softmax(scale q k^T) v, with the row sums that the hook left in delta.
template <class T>
void chain_softmax(const Geometry& g, double scale, const reference::Problem<T>& problem,
                   const std::vector<T>& weights, Outcome<T>& result) {
  const Index d = g.dim_v;
  result.dk.assign(problem.key.size(), T(0));
  result.dv.assign(problem.value.size(), T(0));
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i)
        for (Index j = 0; j < g.len_kv; ++j) {
          const Index row = g.row_index(b, h, i);
          const Index key = ((b * g.kv_heads + g.kv_head(h)) * g.len_kv + j) * d;
          const auto at = [&](Index n) { return std::size_t(n); };
          const T weight = weights[at(row * g.len_kv + j)];
          T x = T(0);
          for (Index c = 0; c < d; ++c)
            x += result.dmixed[at(row * d + c)] * problem.value[at(key + c)];
          const T dscore = T(scale) * weight * (x - result.delta[at(row)]);
          for (Index c = 0; c < d; ++c) {
            result.dv[at(key + c)] += weight * result.dmixed[at(row * d + c)];
            result.dk[at(key + c)] += dscore * problem.query[at(row * d + c)];
            result.dq[at(row * d + c)] += dscore * problem.key[at(key + c)];
          }
        }
}

template <class T>
Outcome<T> run(const Dialectical<T>& op, const reference::Problem<T>& problem, int vectors,
               const std::vector<T>& dout = {}) {
  const Geometry& g = problem.geometry;
  op.validate(g, "test");
  reference::Request request;
  request.weights = true;
  const auto slow = reference::forward(op, problem, request);
  Outcome<T> result;
  run_forward(op.readout, g, vectors, problem.query, slow.mixed, result);
  if (dout.empty()) return result;
  run_vjp(op.readout, g, vectors, problem.query, slow.mixed, dout, result);
  const double scale = problem.scale ? *problem.scale : reference::default_scale(op, g);
  chain_softmax(g, scale, problem, slow.weights, result);
  return result;
}

// ---- cases ----------------------------------------------------------------------------------

// The halting unit is not the source's (tests/ops/ponder_test.cpp).
bool of_source(const std::string& param) { return !param.starts_with("halt."); }

template <class T>
Dialectical<T> golden_op(const GoldenCase& c) {
  Dialectical<T> op;
  op.readout.max_steps = int(c.integer("max_steps"));
  op.readout.halt_eps = c.number("halt_eps");
  op.readout.halting = c.text("halting") == "seed" ? Halting::batch : Halting::per_token;
  op.visit([&](const char* name, Param<T>& p) {
    if (of_source(name)) p = c.param<T>(std::string("param.") + name);
  });
  return op;
}

Dialectical<double> random_op(Index dim, std::uint64_t seed) {
  auto op = make_dialectical<double>(Geometry{.dim_qk = dim, .dim_v = dim});
  op.visit([&](const char*, Param<double>& p) {
    const std::vector<double> x = numbers(p.size(), ++seed);
    const double gain = p.size() > dim ? 2.5 / std::sqrt(double(dim)) : 1.0;
    for (Index n = 0; n < p.size(); ++n) p[n] = gain * x[std::size_t(n)];
  });
  return op;
}

reference::Problem<double> random_problem(Index batch, Index heads, Index kv_heads, Index len,
                                          Index dim) {
  reference::Problem<double> problem;
  problem.geometry = {batch, heads, heads, kv_heads, len, len, dim, dim};
  problem.query = numbers(batch * heads * len * dim, 1);
  problem.key = numbers(batch * kv_heads * len * dim, 2);
  problem.value = numbers(batch * kv_heads * len * dim, 3);
  return problem;
}

void check_against_tape(const Dialectical<double>& op, const reference::Problem<double>& problem,
                        int vectors) {
  const std::vector<double> dout = numbers(Index(problem.query.size()), 4);
  const auto fast = run(op, problem, vectors, dout);
  const auto slow = reference::forward(op, problem);
  CHECK(deviation(fast.out, slow.out) < 1e-13);
  CHECK(deviation(fast.steps_used, slow.diagnostics[0]) == 0.0);
  CHECK(deviation(fast.updates, slow.diagnostics[1]) == 0.0);
  CHECK(deviation(fast.tension, slow.diagnostics[2]) < 1e-14);

  auto exact = reference::gradients(op, problem, dout);
  CHECK(deviation(fast.dq, exact.dquery) < 1e-12);
  CHECK(deviation(fast.dk, exact.dkey) < 1e-12);
  CHECK(deviation(fast.dv, exact.dvalue) < 1e-12);
  auto grad = fast.grad;
  std::vector<Param<double>> wanted;
  exact.op.visit([&](const char*, Param<double>& p) { wanted.push_back(p); });
  std::size_t next = 0;
  visit_parameters(grad, [&](const char* name, Param<double>& p) {
    INFO(name);
    const Param<double>& w = wanted[next++];
    CHECK(deviation(std::vector<double>(p.data(), p.data() + p.size()),
                    std::vector<double>(w.data(), w.data() + w.size())) < 1e-12);
  });
}

// Two keys of equal score with values 1 and 3: m = 2; u+ = 2, u- = -4: cos = -1, tension =
// sigmoid(1). Su u = 0.5 * 2 + 0.25 * -4 = 0, so a = z. The gate stands at 1/2.
Dialectical<double> one_wide_op() {
  Dialectical<double> op;
  op.readout.v_pos = Param<double>({1, 1}, {1.0});
  op.readout.v_neg = Param<double>({1, 1}, {-2.0});
  op.readout.synth = Param<double>({1, 3}, {0.5, 0.25, 1.0});
  op.readout.synth_bias = Param<double>({1}, {0.0});
  op.readout.gate = Param<double>({1, 1}, {0.0});
  op.readout.gate_bias = Param<double>({1}, {0.0});
  return op;
}

reference::Problem<double> two_keys_problem() {
  reference::Problem<double> problem;
  problem.geometry = {1, 1, 1, 1, 1, 2, 1, 1};
  problem.query = {1.0};
  problem.key = {0.0, 0.0};
  problem.value = {1.0, 3.0};
  return problem;
}

}  // namespace

TEST_CASE("dialectical: two keys by hand, one and two steps") {
  Dialectical<double> op = one_wide_op();
  const auto problem = two_keys_problem();

  // step = 1/2 sigmoid(1) silu(1) = sigmoid(1)^2 / 2 = 0.26722...
  op.readout.max_steps = 1;
  const double first = 1.0 + kSigmoidOfOne * kSigmoidOfOne / 2;
  const auto one = run(op, problem, 1, {1.0});
  CHECK(one.out[0] == Approx(first).epsilon(1e-14));
  CHECK(one.tension[0] == Approx(kSigmoidOfOne).epsilon(1e-14));
  CHECK(one.steps_used[0] == 1.0);
  CHECK(one.updates[0] == 1.0);

  // dstep/dbs = 1/2 sigmoid(1) s (1 + 1 - s) with s = sigmoid(1)
  const double slope = kSigmoidOfOne * (2.0 - kSigmoidOfOne);
  CHECK(one.grad.synth_bias[0] == Approx(kSigmoidOfOne / 2 * slope).epsilon(1e-14));
  CHECK(one.grad.synth[0] == Approx(kSigmoidOfOne / 2 * slope * 2).epsilon(1e-14));
  CHECK(one.grad.synth[1] == Approx(kSigmoidOfOne / 2 * slope * -4).epsilon(1e-14));
  CHECK(one.dq[0] == Approx(1.0 + kSigmoidOfOne / 2 * slope).epsilon(1e-14));
  // dstep/dbg = 1/4 sigmoid(1) silu(1)
  CHECK(one.grad.gate_bias[0] == Approx(kSigmoidOfOne * kSigmoidOfOne / 4).epsilon(1e-14));

  op.readout.max_steps = 2;
  const double second = first + kSigmoidOfOne / 2 * first / (1.0 + std::exp(-first));
  CHECK(run(op, problem, 1).out[0] == Approx(second).epsilon(1e-14));
}

TEST_CASE("dialectical: the step that halts a row is applied, and is its last") {
  Dialectical<double> op = one_wide_op();
  const double step = kSigmoidOfOne * kSigmoidOfOne / 2;  // the step at |z| = 1
  op.readout.halt_eps = step * 1.01;
  auto halted = run(op, two_keys_problem(), 1);
  CHECK(halted.out[0] == Approx(1.0 + step).epsilon(1e-14));
  CHECK(halted.steps_used[0] == 0.0);
  CHECK(halted.updates[0] == 1.0);
  op.readout.halt_eps = step * 0.99;
  auto moving = run(op, two_keys_problem(), 1);
  CHECK(moving.out[0] > 1.5);
  CHECK(moving.steps_used[0] >= 1.0);
  op.readout.halt_eps = 0.0;
  op.readout.max_steps = 7;
  CHECK(run(op, two_keys_problem(), 1).steps_used[0] == 7.0);
}

TEST_CASE("dialectical: hooks agree with the oracle on any panel width, in both halting modes") {
  const auto files = heed_test::golden_files(HEED_GOLDEN_DIR, "dial_");
  REQUIRE(files.size() >= 24);
  for (const auto& file : files) {
    const GoldenCase c(file);
    const auto op = golden_op<double>(c);
    for (int vectors = 1; vectors <= kPanelVectors; ++vectors) {
      INFO(c.name() << ", " << vectors << " vectors");
      const auto got = run(op, c.problem<double>(), vectors, c.tensor("dout"));
      if (op.readout.needs_rehearsal()) CHECK(got.steps_of_all == c.integer("n_exec"));
      CHECK(deviation(got.out, c.tensor("out")) < 1e-12);
      CHECK(deviation(got.steps_used, c.tensor("steps_used")) == 0.0);
      CHECK(deviation(got.updates, c.tensor("updates")) == 0.0);
      CHECK(deviation(got.tension, c.tensor("tension")) < 1e-12);
      CHECK(deviation(got.dq, c.tensor("dq")) < 1e-12);
      CHECK(deviation(got.dk, c.tensor("dk")) < 1e-12);
      CHECK(deviation(got.dv, c.tensor("dv")) < 1e-12);
      auto grad = got.grad;
      visit_parameters(grad, [&](const char* name, Param<double>& p) {
        if (!of_source(name)) return;
        INFO(name);
        const std::vector<double> values(p.data(), p.data() + p.size());
        // The oracle's gradient of b_pos and b_neg is rounding noise about 0.
        const std::string stored = std::string("grad.") + name;
        CHECK(deviation(values, c.tensor(stored), 1e-9) < 1e-12);
      });
      CHECK(got.grad.b_pos[0] == 0.0);
      CHECK(got.grad.b_neg[0] == 0.0);
    }
  }
}

TEST_CASE("dialectical: the slow twin agrees with the oracle") {
  for (const auto& file : heed_test::golden_files(HEED_GOLDEN_DIR, "dial_")) {
    const GoldenCase c(file);
    INFO(c.name());
    const auto op = golden_op<double>(c);
    const auto got = reference::forward(op, c.problem<double>());
    CHECK(deviation(got.out, c.tensor("out")) < 1e-12);
    CHECK(deviation(got.diagnostics[0], c.tensor("steps_used")) == 0.0);
    CHECK(deviation(got.diagnostics[1], c.tensor("updates")) == 0.0);
    CHECK(deviation(got.diagnostics[2], c.tensor("tension")) < 1e-12);
  }
}

TEST_CASE("dialectical: float hooks agree with the double twin on float inputs") {
  for (const auto& file : heed_test::golden_files(HEED_GOLDEN_DIR, "dial_")) {
    const GoldenCase c(file);
    INFO(c.name());
    const auto op = golden_op<float>(c);
    const auto problem = c.problem<float>();
    const auto dout = c.rounded<float>("dout");
    const auto got = run(op, problem, kPanelVectors, dout);
    const auto twin = cast_op<double>(op);
    const auto wide = reference::cast_problem<double>(problem);
    const auto slow = reference::forward(twin, wide);
    CHECK(deviation(got.out, slow.out) < 2e-6);
    CHECK(deviation(got.steps_used, slow.diagnostics[0]) == 0.0);
    CHECK(deviation(got.updates, slow.diagnostics[1]) == 0.0);
    CHECK(deviation(got.tension, slow.diagnostics[2]) < 1e-6);
    const auto exact = reference::gradients(twin, wide, {dout.begin(), dout.end()});
    CHECK(deviation(got.dq, exact.dquery) < 1e-5);
    CHECK(deviation(got.dk, exact.dkey) < 1e-5);
    CHECK(deviation(got.dv, exact.dvalue) < 1e-5);
    const auto& synth = exact.op.readout.synth;
    CHECK(deviation(std::vector<float>(got.grad.synth.data(), got.grad.synth.data() + synth.size()),
                    std::vector<double>(synth.data(), synth.data() + synth.size())) < 1e-5);
  }
}

TEST_CASE("dialectical: vjp is the derivative of the slow twin, for every input and parameter") {
  for (const Index dim : {1, 3, 8, 16, 33})
    for (const Halting halting : {Halting::per_token, Halting::batch})
      for (const int steps : {1, 2, 4}) {
        INFO("dim " << dim << ", steps " << steps << ", batch " << (halting == Halting::batch));
        auto op = random_op(dim, 10 + std::uint64_t(dim));
        op.readout.max_steps = steps;
        op.readout.halting = halting;
        op.readout.halt_eps = 0.15;
        auto problem = random_problem(2, 2, 1, 11, dim);
        problem.mask = causal<double>();
        check_against_tape(op, problem, 1 + steps % kPanelVectors);
      }
}

TEST_CASE("dialectical: vjp is the derivative where summaries lie below the floor of the cosine") {
  auto op = random_op(5, 3);
  op.readout.halt_eps = 0.0;
  for (const double size : {1e-7, 1e-30}) {
    auto problem = random_problem(1, 1, 1, 9, 5);
    for (double& v : problem.value) v *= size;
    check_against_tape(op, problem, 1);
  }
}

TEST_CASE("dialectical: a row that sees no key has tension 1/2 and still recurses") {
  auto op = random_op(4, 5);
  op.readout.halt_eps = 0.0;
  auto problem = random_problem(2, 1, 1, 6, 4);
  problem.mask.key_lengths = std::vector<Index>{0, 6};
  const auto got = run(op, problem, 1, numbers(48, 9));
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(got.tension[i] == 0.5);
    CHECK(got.steps_used[i] == 3.0);
    CHECK(got.out[4 * i] != problem.query[4 * i]);
  }
  CHECK(std::all_of(got.dv.begin(), got.dv.begin() + 24, [](double x) { return x == 0.0; }));
  check_against_tape(op, problem, 1);
}

TEST_CASE("dialectical: an op that is made for sizes fits them, and moves no row") {
  const auto problem = random_problem(2, 1, 1, 6, 4);
  const auto op = make_dialectical<double>(
      problem.geometry, {.max_steps = 5, .halt_eps = 0.25, .halting = Halting::batch});
  CHECK_NOTHROW(op.validate(problem.geometry, "here"));
  CHECK(op.readout.max_steps == 5);
  CHECK(op.readout.halt_eps == 0.25);
  CHECK(op.readout.halting == Halting::batch);
  CHECK(reference::forward(op, problem).out == problem.query);
}

TEST_CASE("dialectical: tension lies between sigmoid(-1) and sigmoid(1)") {
  auto op = random_op(3, 6);
  const auto problem = random_problem(1, 1, 1, 40, 3);
  for (const double t : run(op, problem, 1).tension) {
    CHECK(t <= kSigmoidOfOne + 1e-15);
    CHECK(t >= 1.0 - kSigmoidOfOne - 1e-15);
  }
  op.readout.v_neg = op.readout.v_pos;
  for (const double t : run(op, problem, 1).tension)
    CHECK(t == Approx(1.0 - kSigmoidOfOne).epsilon(1e-14));
  for (Index n = 0; n < 9; ++n) op.readout.v_neg[n] = -0.01 * op.readout.v_pos[n];
  for (const double t : run(op, problem, 1).tension)
    CHECK(t == Approx(kSigmoidOfOne).epsilon(1e-14));
}

TEST_CASE("dialectical: long rows in float make no NaN, forward or backward") {
  const auto op = cast_op<float>(random_op(16, 7));
  const Geometry g{1, 1, 1, 1, 20, 20, 16, 16};
  std::vector<float> query, mixed, dout;
  for (const double x : numbers(320, 1)) query.push_back(float(x) * 1e26F);
  for (const double x : numbers(320, 2)) mixed.push_back(float(x) * 1e28F);
  for (const double x : numbers(320, 3)) dout.push_back(float(x));
  Outcome<float> got;
  run_forward(op.readout, g, 1, query, mixed, got);
  run_vjp(op.readout, g, 1, query, mixed, dout, got);
  const auto all_finite = [](const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
  };
  CHECK(all_finite(got.out));
  CHECK(all_finite(got.tension));
  CHECK(all_finite(got.dq));
  CHECK(all_finite(got.dmixed));
  visit_parameters(got.grad, [&](const char* name, Param<float>& p) {
    INFO(name);
    CHECK(all_finite({p.data(), p.data() + p.size()}));
  });
}

TEST_CASE("dialectical: per token, no bit of a row depends on other rows or the panel's width") {
  auto op = random_op(8, 8);
  op.readout.halt_eps = 0.25;
  op.readout.max_steps = 5;
  const Geometry g{1, 1, 1, 1, 3 * kLanes<double> + 1, 1, 8, 8};
  const std::vector<double> query = numbers(g.len_q * 8, 1), mixed = numbers(g.len_q * 8, 2);
  const std::vector<double> dout = numbers(g.len_q * 8, 3);
  Outcome<double> all;
  run_forward(op.readout, g, kPanelVectors, query, mixed, all);
  run_vjp(op.readout, g, kPanelVectors, query, mixed, dout, all);
  CHECK(*std::min_element(all.updates.begin(), all.updates.end()) <
        *std::max_element(all.updates.begin(), all.updates.end()));

  for (Index keep = 0; keep < g.len_q; ++keep) {
    std::vector<double> other_query = query, other_mixed = mixed, other_dout = dout;
    for (Index n = 0; n < g.len_q * 8; ++n)
      if (n / 8 != keep) {
        const auto at = std::size_t(n);
        other_query[at] = n % 2 == 0 ? 1e200 : std::numeric_limits<double>::quiet_NaN();
        other_mixed[at] = 1e200;
        other_dout[at] = -3.0;
      }
    Outcome<double> alone;
    run_forward(op.readout, g, 1, other_query, other_mixed, alone);
    run_vjp(op.readout, g, 1, other_query, other_mixed, other_dout, alone);
    const auto row = std::size_t(keep);
    for (std::size_t n = 8 * row; n < 8 * row + 8; ++n) {
      CHECK(alone.out[n] == all.out[n]);
      CHECK(alone.dq[n] == all.dq[n]);
      CHECK(alone.dmixed[n] == all.dmixed[n]);
    }
    CHECK(alone.delta[row] == all.delta[row]);
    CHECK(alone.steps_used[row] == all.steps_used[row]);
    CHECK(alone.updates[row] == all.updates[row]);
  }
}

TEST_CASE("dialectical: in batch mode one slow row keeps all rows moving") {
  auto op = random_op(8, 8);
  op.readout.halt_eps = 0.2;
  op.readout.max_steps = 6;
  op.readout.halting = Halting::batch;
  const Geometry g{1, 1, 1, 1, 40, 1, 8, 8};
  const std::vector<double> query = numbers(320, 1), mixed = numbers(320, 2);
  Outcome<double> got;
  run_forward(op.readout, g, 1, query, mixed, got);
  CHECK(got.steps_of_all > 1);
  for (const double n : got.updates) CHECK(n == got.steps_of_all);

  auto alone = op;
  alone.readout.halting = Halting::per_token;
  Outcome<double> halting;
  run_forward(alone.readout, g, 1, query, mixed, halting);
  CHECK(*std::max_element(halting.updates.begin(), halting.updates.end()) == got.steps_of_all);
  CHECK(*std::min_element(halting.updates.begin(), halting.updates.end()) < got.steps_of_all);
}

TEST_CASE("dialectical: a rehearsal is asked for only where it decides something") {
  DialecticalReadout<float> readout;
  CHECK_FALSE(readout.needs_rehearsal());
  readout.halting = Halting::batch;
  CHECK(readout.needs_rehearsal());
  readout.max_steps = 1;
  CHECK_FALSE(readout.needs_rehearsal());
}

TEST_CASE("dialectical: b_pos and b_neg have no effect, and gradient 0") {
  auto op = random_op(6, 9);
  const auto problem = random_problem(1, 2, 2, 7, 6);
  const std::vector<double> dout = numbers(84, 5);
  const auto before = run(op, problem, 1, dout);
  op.readout.b_pos[0] = 3.0;
  op.readout.b_neg[0] = -40.0;
  const auto after = run(op, problem, 1, dout);
  CHECK(after.out == before.out);
  CHECK(after.dq == before.dq);
  CHECK(after.grad.b_pos[0] == 0.0);
  CHECK(after.grad.b_neg[0] == 0.0);
}

TEST_CASE("dialectical: parameters are visited under the source's names; a cast keeps all") {
  auto op = random_op(3, 11);
  op.readout.halting = Halting::batch;
  op.readout.max_steps = 9;
  op.readout.halt_eps = 0.25;
  auto cast = cast_op<float>(op);
  CHECK(cast.readout.halting == Halting::batch);
  CHECK(cast.readout.max_steps == 9);
  CHECK(cast.readout.halt_eps == 0.25);
  CHECK(cast.readout.synth[5] == float(op.readout.synth[5]));
  std::vector<std::string> names;
  cast.visit([&](const char* name, Param<float>&) { names.emplace_back(name); });
  CHECK(names == std::vector<std::string>{"v_pos.weight", "v_neg.weight", "synth.weight",
                                          "synth.bias", "gate.weight", "gate.bias", "b_pos",
                                          "b_neg", "halt.weight", "halt.bias"});
  CHECK(std::string(cast.readout.diagnostic_name(0)) == "steps_used");
  CHECK(std::string(cast.readout.diagnostic_name(1)) == "updates");
  CHECK(std::string(cast.readout.diagnostic_name(2)) == "tension");
}

TEST_CASE("dialectical: nonsense is refused in one sentence") {
  const Geometry g{1, 1, 1, 1, 4, 4, 6, 6};
  const auto refusal = [&](const Dialectical<double>& op, const Geometry& geometry) {
    try {
      op.validate(geometry, "here");
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto op = random_op(6, 12);
  CHECK(refusal(op, g) == "accepted");

  auto bad = op;
  bad.readout.max_steps = 0;
  CHECK(refusal(bad, g) == "here: max_steps is 0, it must be at least 1");
  bad = op;
  for (const double eps :
       {-1e-3, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    bad.readout.halt_eps = eps;
    CHECK(refusal(bad, g).find("here: halt_eps is") == 0);
  }
  bad = op;
  bad.readout.synth = Param<double>(std::vector<Index>{6, 6});
  CHECK(refusal(bad, g) ==
        "here: synth.weight has shape (6,6), it must be (6,18) for heads of width 6");
  bad = op;
  bad.readout.b_neg = Param<double>();
  CHECK(refusal(bad, g) == "here: b_neg has shape (), it must be (1) for heads of width 6");
  Geometry wide = g;
  wide.dim_v = 12;
  CHECK(refusal(op, wide) == "here: value has dim_v 12, it must equal dim_qk, which is 6");
  CHECK(refusal(Dialectical<double>(), g).find("here: v_pos.weight has shape ()") == 0);
}
