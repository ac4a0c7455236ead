// SPDX-License-Identifier: Apache-2.0
// check_op finds a fault at a single shape, in a bias gradient alone and in an extra input alone;
// and its report says what ran, and what did not.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_check.hpp>
#include <heed/check/op_timing.hpp>
#include <heed/explain.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_kit.hpp>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace {

using namespace heed;
using heed_test::message_of;

enum class Fault { none, one_query, rectangular, widths, extra, extra_at_zero };

// out = mixed, with the given fault.
template <class T>
struct Through : PlainReadout {
  static constexpr bool saves_mixed = true;
  Fault fault = Fault::none;
  static constexpr auto parameters = std::tuple{option("fault", &Through::fault)};

  [[nodiscard]] T factor(const Geometry& g, bool backward) const {
    const bool wrong = (fault == Fault::one_query && backward && g.len_q == 1) ||
                       (fault == Fault::rectangular && g.len_q != 1 && g.len_q != g.len_kv) ||
                       (fault == Fault::widths && g.dim_qk != g.dim_v);
    return wrong ? T(1.5) : T(1);
  }
  void times(const ReadoutPanel<T>& panel, T by) const {
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v) panel.tile.store(c, v, panel.tile.load(c, v) * by);
  }
  void forward(const ReadoutPanel<T>& panel) const { times(panel, factor(panel.geometry, false)); }
  void vjp(const ReadoutPanel<T>& panel, Through&) const {
    times(panel, factor(panel.geometry, true));
    lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(ReadoutContext<S>&) const {}
};

// out = mixed (1 + x^2), x the extra input.
template <class T>
struct ByExtra : PlainReadout {
  static constexpr bool saves_mixed = true, uses_extra = true;
  Fault fault = Fault::none;
  static constexpr auto parameters = std::tuple{option("fault", &ByExtra::fault)};

  [[nodiscard]] Index extra_dim(const Geometry&) const { return 1; }
  void forward(const ReadoutPanel<T>& panel) const {
    for (int v = 0; v < panel.vectors; ++v) {
      const Pack<T> x = panel.extra.load(0, v);
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, panel.tile.load(c, v) * (x * x + T(1)));
    }
  }
  void vjp(const ReadoutPanel<T>& panel, ByExtra&) const {
    for (int v = 0; v < panel.vectors; ++v) {
      const Pack<T> x = panel.extra.load(0, v);
      Pack<T> pull = T(0);
      for (Index c = 0; c < panel.tile.rows; ++c) {
        const Pack<T> g = panel.tile.load(c, v);
        pull += g * panel.saved.load(c, v);
        panel.tile.store(c, v, g * (x * x + T(1)));
      }
      Pack<T> slope = x + x;
      if (fault == Fault::extra) slope = x;
      if (fault == Fault::extra_at_zero) slope = x * x * T(2) / x;
      panel.dextra.store(0, v, pull * slope);
    }
    lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(ReadoutContext<S>& all) const {
    for (std::size_t n = 0; n < all.out.size(); ++n) {
      const S x = all.extra[n / std::size_t(all.geometry.dim_v)];
      all.out[n] = all.out[n] * (math::constant<S>(1) + x * x);
    }
  }
};

// A score of the distance alone: query and key have no gradient that could be wrong.
template <class T>
struct Distances {
  template <class S>
  S score(const auto& pair, const auto&) const {
    return S(-0.1 * distance(pair));
  }
};
// A softmax whose gradient is wrong by the factor 1 + `error`.
template <class T>
struct RowSoftmax : PlainRows {
  double error = 0;
  static constexpr auto parameters = std::tuple{option("error", &RowSoftmax::error)};
  void weigh(const RowBlock<T>& block, int v, const LaneTile<T>& weights) const {
    const auto [top, sum] = exponentiate_row(block, v, weights);
    scale_row(weights, v, Pack<T>(T(1) / sum));
  }
  void forward(const RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh(block, v, block.scores[0]);
  }
  void vjp(const RowBlock<T>& block, RowSoftmax&) const {
    for (int v = 0; v < block.vectors; ++v) {
      weigh(block, v, block.dscores[0]);
      (void)softmax_row_vjp(block, v);
      scale_row(block.dscores[0], v, Pack<T>(T(1 + error)));
    }
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    return long_hand_softmax(row.scores[0]);
  }
};

// A factor per column: parameters of one width.
template <class T>
struct Columns : Through<T> {
  Param<T> factor = Param<T>(std::vector<Index>{6}, std::vector<T>(6, T(1)));
  void check(const Geometry& g, const char* where) const {
    require(factor.size() == g.dim_v, where, ": factor has ", factor.size(), " values, dim_v is ",
            g.dim_v);
  }
};

// A readout and a softmax with references for plain numbers alone: jvp() takes neither.
template <class T>
struct NumbersThrough : Through<T> {
  template <class S>
  requires std::is_arithmetic_v<S>
  void reference(ReadoutContext<S>&) const {}
};
template <class T>
struct NumbersSoftmax : RowSoftmax<T> {
  template <class S>
  requires std::is_arithmetic_v<S> std::vector<S> reference(const LongHandRow<S>& row)
  const { return long_hand_softmax(row.scores[0]); }
};

template <template <class> class Readout>
[[nodiscard]] OpReport check_with(Fault fault) {
  Attention<double, DotScore<double>, Softmax<double>, Readout<double>> op;
  op.readout.fault = fault;
  return check_op(op);
}

// Names of the cases that failed.
[[nodiscard]] std::vector<std::string> failed(const OpReport& report) {
  std::vector<std::string> names;
  for (const auto& [name, what] : report.cases)
    if (!what.passed) names.push_back(name);
  return names;
}
[[nodiscard]] bool holds(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}
// The check fails, and only in cases whose name holds `part`.
void check_fails_only_in(const OpReport& report, const char* part) {
  INFO(report.text());
  CHECK_FALSE(report.passed());
  CHECK_FALSE(failed(report).empty());
  for (const std::string& name : failed(report)) {
    INFO(name);
    CHECK(holds(name, part));
  }
}

// The check fails in the gradients of one tensor alone, and therefore in the transpose of forward mode along it.
void check_fails_only_along(const OpReport& report, const std::string& tensor) {
  INFO(report.text());
  CHECK(failed(report).size() >= 2);
  for (const auto& [name, what] : report.cases)
    for (const Mismatch& entry : what.failures)
      CHECK(entry.tensor == (holds(name, "gradients") ? tensor : "<u, J x> along " + tensor));
}

}  // namespace

TEST_CASE(
    "check_op runs one query of grouped heads, rectangular lengths and other widths, and says so",
    "[op_check]") {
  const OpReport report = check_with<Through>(Fault::none);
  INFO(report.text());
  CHECK(report.passed());
  CHECK(report.left_out.empty());
  CHECK(report.cases.size() == 3 * (4 + 3 * 2) + 1);
  CHECK(report.summary().find("passed: 31 checks, ") == 0);
  for (const char* sizes :
       {"one query of grouped heads (heads 4, kv_heads 2, len_q 1, len_kv 11, dim_qk 6, dim_v 6)",
        "rectangular (heads 4, kv_heads 2, len_q 11, len_kv 16, dim_qk 6, dim_v 6)",
        "values of another width (heads 4, kv_heads 2, len_q 11, len_kv 11, dim_qk 6, dim_v 9)"})
    CHECK(holds(report.text(), sizes));
}

TEST_CASE("a summary is one line, with a line for each check that failed", "[op_check]") {
  OpReport report;
  CHECK(report.summary() == "passed: 0 checks, 0 numbers, worst error 0");
  const auto add = [&](const char* name, std::vector<Mismatch> entries) {
    GradientReport one;
    for (const Mismatch& entry : entries) detail::note(one, entry, 1e-8, 20);
    report.cases.emplace_back(name, one);
  };
  add("out, causal", {{"out", 0, 1, 1, 0}, {"out", 1, 0.5, 0.5, 0}});
  add("lse, causal", {{"lse", 0, 2, 2, 0}});
  CHECK(report.summary() == "passed: 2 checks, 3 numbers, worst error 0");
  add("gradients, causal", {{"query", 0, 2, 2, 0}, {"key", 3, 1, 1 - 1.25e-10, 0}});
  CHECK(report.summary() == "passed: 3 checks, 5 numbers, worst error 1.3e-10 (gradients: key[3])");
  report.left_out.emplace_back("forward mode", "no jvp() of it");
  CHECK(report.summary() ==
        "passed: 3 checks, 5 numbers, worst error 1.3e-10 (gradients: key[3]); 1 left out, "
        "text() says why");
  report.left_out.clear();
  add("gradients, no mask", {{"bias", 4, 0.25, 0.5, 0}, {"bias", 6, 1, 1, 0}, {"key", 2, 3, 4, 0}});
  add("finite", {{"query", 7, std::nan(""), 0, 0}});
  CHECK(report.summary() ==
        "FAILED: 2 of 5 checks, 3 of 9 numbers\n"
        "  finite: 1 of 1 differ, worst query[7]: analytic nan, numeric 0, error inf\n"
        "  gradients, no mask: 2 of 3 differ, worst bias[4]: analytic 0.25, numeric 0.5, error "
        "0.25");
}

TEST_CASE("check_op does not repeat sizes that the caller's have already", "[op_check]") {
  const Geometry decoding{1, 4, 4, 1, 1, 9, 6, 5};
  const OpReport report =
      check_op(Attention<double, DotScore<double>, Softmax<double>, Through<double>>{}, decoding);
  INFO(report.text());
  CHECK(report.passed());
  CHECK(report.cases.size() == 3 * 4 + 1);
}

TEST_CASE("check_op groups the heads of a geometry that has none, for its one query",
          "[op_check]") {
  for (const Index heads : {1, 2, 3}) {
    const Geometry g{1, heads, heads, heads, 5, 5, 4, 4};
    const OpReport report =
        check_op(Attention<double, DotScore<double>, Softmax<double>, Through<double>>{}, g);
    INFO(report.text());
    CHECK(report.passed());
    CHECK(holds(report.text(), heads == 1   ? "(heads 4, kv_heads 2, len_q 1,"
                               : heads == 2 ? "(heads 2, kv_heads 1, len_q 1,"
                                            : "(heads 3, kv_heads 1, len_q 1,"));
  }
}

TEST_CASE("an op that is wrong for one query alone fails check_op", "[op_check]") {
  check_fails_only_in(check_with<Through>(Fault::one_query), "one query of grouped heads");
}
TEST_CASE("an op that is wrong for rectangular lengths alone fails check_op", "[op_check]") {
  check_fails_only_in(check_with<Through>(Fault::rectangular), "rectangular");
}
TEST_CASE("an op that is wrong for values of another width alone fails check_op", "[op_check]") {
  check_fails_only_in(check_with<Through>(Fault::widths), "values of another width");
}

TEST_CASE("a wrong gradient of the extra input fails check_op", "[op_check]") {
  CHECK(check_with<ByExtra>(Fault::none).passed());
  const OpReport report = check_with<ByExtra>(Fault::extra);
  check_fails_only_along(report, "extra");
}
TEST_CASE("an extra gradient that is NaN at an extra input of 0 fails check_op", "[op_check]") {
  check_fails_only_in(check_with<ByExtra>(Fault::extra_at_zero), "finite");
}

TEST_CASE("a gradient that is wrong for the bias alone fails check_op", "[op_check]") {
  Attention<double, OwnScore<Distances, double>, RowSoftmax<double>, Identity<double>> op;
  CHECK(check_op(op).passed());
  op.normaliser.error = 0.5;
  const OpReport report = check_op(op);
  check_fails_only_in(report, "bias");
  check_fails_only_along(report, "bias");
}

TEST_CASE("check_op says which sizes an op refuses, and why", "[op_check]") {
  const OpReport columns =
      check_op(Attention<double, DotScore<double>, Softmax<double>, Columns<double>>{});
  INFO(columns.text());
  CHECK(columns.passed());
  CHECK(holds(columns.text(), "dim_v 9): left out, the op: factor has 6 values, dim_v is 9"));

  const Geometry g{1, 2, 2, 1, 5, 5, 4, 4};
  const OpReport own_row = check_op(make_intent_calculated<double>(g), g);
  INFO(own_row.text());
  CHECK(own_row.passed());
  CHECK(own_row.left_out.size() == 1);
  CHECK(holds(own_row.text(),
              "(heads 2, kv_heads 1, len_q 1, len_kv 5, dim_qk 4, dim_v 4), causal & bias"));
}

TEST_CASE("check_op says of which ops there is no forward mode, and why", "[op_check]") {
  const auto check_left_out = [](const auto& op, const std::vector<std::string>& why) {
    const OpReport report = check_op(op);
    INFO(report.text());
    CHECK(report.passed());
    CHECK(report.cases.size() == 2 * (4 + 3 * 2) + 1);
    CHECK(report.left_out.size() == why.size());
    for (const std::string& one : why)
      CHECK(holds(report.text(), ("forward mode: left out, no jvp() of it: " + one).c_str()));
  };
  const std::string readout = "reference() of its readout takes no dual numbers",
                    rows =
                        "its normaliser has no jvp(), and reference() of it takes no dual "
                        "numbers";
  check_left_out(Attention<double, DotScore<double>, Softmax<double>, NumbersThrough<double>>{},
                 {readout});
  check_left_out(
      Attention<double, DotScore<double>, NumbersSoftmax<double>, NumbersThrough<double>>{},
      {rows, readout});
}

TEST_CASE("check_op, time_op and explain refuse sizes that no call has", "[op_check]") {
  const ScaledDot<double> op;
  Geometry g{1, 3, 3, 3, 5, 5, 4, 4};
  const auto all_say = [&](const std::string& what) {
    CHECK(message_of([&] { (void)check_op(op, g); }) == "check_op: " + what);
    CHECK(message_of([&] { (void)time_op(op, g); }) == "time_op: " + what);
    CHECK(message_of([&] { (void)explain(op, g); }) == "heed::explain: " + what);
  };
  g.query_heads = 0;
  all_say("the geometry has query_heads 0, for 3 heads of the op it must be 3");
  g.query_heads = 3;
  g.kv_heads = 2;
  all_say("3 heads cannot share 2 kv_heads evenly");
  g.kv_heads = 3;
  g.dim_v = 0;
  all_say("the geometry has dim_qk 4 and dim_v 0, both must be at least 1");
  g.dim_v = 4;
  g.len_q = -2;
  all_say(
      "the geometry has batch 1, heads 3, kv_heads 3, len_q -2, len_kv 5; none may be negative");
  g.len_q = 0;
  CHECK(message_of([&] { (void)check_op(op, g); }) ==
        "check_op: the geometry has batch 1, heads 3, len_q 0, len_kv 5; all must be at least 1");
  CHECK(explain(op, g).units == 0);
}

TEST_CASE("time_op tells the minimum, the median and the quartiles of both passes") {
  OpTiming timing;
  timing.forward = {1e-3, 2e-3, 3e-3, 4e-3};
  timing.forward_ratio = {1.1, 1.2, 1.3, 1.4};
  timing.backward = {0.01, 0.02, 0.03, 0.04};
  timing.backward_ratio = {2, 3, 4, 5};
  CHECK(timing.text() ==
        "forward 3 ms (minimum 1, quartiles 2 to 4), 1.3 x plain attention (1.2 to 1.4)\n"
        "backward 30 ms (minimum 10, quartiles 20 to 40), 4 x plain attention (3 to 5)");
  const OpTiming measured =
      time_op(ScaledDot<double>{}, {1, 2, 2, 2, 9, 9, 4, 4}, {}, 3, {.threads = 1});
  for (const Spread& s :
       {measured.forward, measured.backward, measured.forward_ratio, measured.backward_ratio}) {
    CHECK(s.minimum > 0);
    CHECK(s.minimum <= s.lower);
    CHECK(s.lower <= s.median);
    CHECK(s.median <= s.upper);
  }
  CHECK_THROWS_AS(time_op(ScaledDot<double>{}, {1, 2, 2, 2, 9, 9, 4, 4}, {}, 0),
                  std::invalid_argument);
}
