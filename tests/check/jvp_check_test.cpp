// SPDX-License-Identifier: Apache-2.0
// check_jvp and check_op pass ops whose forward mode is right, and find the fault in a derivative that only jvp() reads.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/jvp_check.hpp>
#include <heed/check/op_check.hpp>
#include <heed/check/op_timing.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <string>

namespace {

using namespace heed;
using heed_test::message_of;

template <class T>
struct Turned {
  using Transform = Rotation<T>;
  Param<T> heat = T(0.7);
  static constexpr auto parameters = std::tuple{named("heat", &Turned::heat)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.logit;
  }
};

// A transform of both sides; with `wrong` its formula over numbers with tangents ignores the learnt angle.
template <class T>
struct Angle : PlainTransform {
  Param<T> angle = T(0.3);
  bool wrong = false;
  static constexpr auto parameters =
      std::tuple{named("angle", &Angle::angle), option("wrong", &Angle::wrong)};
  template <class Row>
  void transform(RowSide side, Index head, const Row& x) const {
    using S = typename Row::Scalar;
    if (side == RowSide::query) return;
    S by = S(angle.head(head));
    if constexpr (requires {
                    by.value;
                    by.grad;
                  })
      if (wrong) by = S(by.value);
    x.set(0, x(0) * math::exp(by));
  }
  template <class Row, class Sum>
  void transform_vjp(RowSide side, Index head, const Row& x, const Row& d, const Sum& sum,
                     Angle& grad) const {
    using S = typename Row::Scalar;
    if (side == RowSide::query) return;
    const S factor = math::exp(S(angle.head(head)));
    grad.angle.head(head) += sum(S(d(0) * x(0) * factor));
    d.set(0, d(0) * factor);
  }
};
template <class T>
struct Stretched {
  using Transform = Angle<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

}  // namespace

TEST_CASE("check_jvp passes ops whose forward mode is right", "[op_check]") {
  const auto passes = [](const OpReport& report, std::size_t cases) {
    INFO(report.text());
    CHECK(report.passed());
    CHECK(report.cases.size() == cases);
    for (const auto& [name, what] : report.cases) CHECK(what.checked > 0);
  };
  passes(check_jvp(ScaledDot<float>{}), 2 * (4 + 3 * 2));
  passes(check_jvp(OwnAttention<Turned, double>{}), 2 * (4 + 3 * 2));
  const Geometry g{1, 2, 2, 1, 5, 5, 4, 4};
  const OpReport own_row = check_jvp(make_intent_calculated<double>(g), g);
  passes(own_row, 2 * (4 + 2 * 2));
  CHECK(own_row.left_out.size() == 1);
}

TEST_CASE("a tangent of a parameter that is wrong in forward mode alone fails both checks",
          "[op_check]") {
  OwnAttention<Stretched, double> op;
  CHECK(check_jvp(op).passed());
  CHECK(check_op(op).passed());
  op.score.wrong = true;
  for (const OpReport& report : {check_jvp(op), check_op(op)}) {
    INFO(report.text());
    CHECK_FALSE(report.passed());
    for (const auto& [name, what] : report.cases) {
      INFO(name);
      CHECK(what.passed == (name.find("forward mode") != 0 && name.find("differences") != 0));
      for (const Mismatch& entry : what.failures)
        CHECK(entry.tensor.find("along score.angle") != std::string::npos);
    }
  }
}

TEST_CASE("check_jvp and time_jvp refuse sizes that no call has", "[op_check]") {
  const ScaledDot<double> op;
  Geometry g{1, 3, 3, 2, 5, 5, 4, 4};
  CHECK(message_of([&] { (void)check_jvp(op, g); }) ==
        "check_jvp: 3 heads cannot share 2 kv_heads evenly");
  CHECK(message_of([&] { (void)time_jvp(op, g); }) ==
        "time_jvp: 3 heads cannot share 2 kv_heads evenly");
  g.kv_heads = 3;
  CHECK(message_of([&] { (void)time_jvp(op, g, {}, 0); }) ==
        "time_jvp: repeats is 0, it must be positive");
  g.len_q = 0;
  CHECK(message_of([&] { (void)check_jvp(op, g); }) ==
        "check_jvp: the geometry has batch 1, heads 3, len_q 0, len_kv 5; all must be at least 1");
}

TEST_CASE("time_jvp tells the minimum, the median and the quartiles of both ways") {
  JvpTiming timing;
  timing.saved = {1e-3, 2e-3, 3e-3, 4e-3};
  timing.saved_ratio = {1.1, 1.2, 1.3, 1.4};
  timing.found = {5e-3, 6e-3, 7e-3, 8e-3};
  timing.found_ratio = {2.1, 2.2, 2.3, 2.4};
  CHECK(timing.text() ==
        "jvp with saved 3 ms (minimum 1, quartiles 2 to 4), 1.3 x forward (1.2 to 1.4)\n"
        "jvp without 7 ms (minimum 5, quartiles 6 to 8), 2.3 x forward (2.2 to 2.4)");
  const JvpTiming run =
      time_jvp(OwnAttention<Turned, float>{}, {1, 2, 2, 1, 40, 40, 8, 8}, causal<float>(), 3);
  CHECK(run.saved.minimum > 0);
  CHECK(run.found.minimum <= run.found.median);
  CHECK(run.saved_ratio.lower <= run.saved_ratio.upper);
}
