// SPDX-License-Identifier: Apache-2.0
// The loops that DarScore::with_form() takes for common options have the value and every derivative of its formula,
// score() and score_vjp(), which the reference runs.

#include "catch.hpp"
#include "door_case.hpp"

using namespace heed;
using namespace heed_test;

namespace {

// True if with_form() passes another type than the score itself.
[[nodiscard]] bool has_fast_form(const DarScore<double>& score) {
  bool fast = false;
  DarScore<double>::with_form(score, [&](const auto& form) {
    fast = !std::is_same_v<std::remove_cvref_t<decltype(form)>, DarScore<double>>;
  });
  return fast;
}

void check_form(Dar<double> op) {
  REQUIRE(has_fast_form(op.score));
  const Geometry g{2, 4, 4, 2, 37, 29, 6, 5};
  for (const bool per_head : {false, true}) {
    if (per_head) {
      op.score.strength = {0.3, -0.2, 1.5, 0.0};
      op.score.vigilance = {0.6, 0.1, -0.3, 0.4};
    }
    INFO((per_head ? "a parameter per head" : "one parameter"));
    for (const Mask<double>& mask :
         {Mask<double>{}, causal<double>(Align::bottom_right) & soft_cap<double>(2.0)})
      check_twin(op, g, mask, 9);
  }
}

}  // namespace

TEST_CASE("the static gate's fast form equals the formula, with every derivative") {
  check_form({});
}

TEST_CASE("the unrolled gate's fast forms equal the formula, with every derivative") {
  for (const int iterations : {2, 3, 4, 7}) {
    INFO(iterations << " iterations");
    Dar<double> op;
    op.score.iterations = iterations;
    op.score.feedback = 0.45;
    check_form(op);
  }
}

TEST_CASE("the converged gate's fast form equals the formula, with every derivative") {
  for (const double feedback : {-0.45, 0.1, 0.4, 0.48, 0.495}) {
    INFO("feedback " << feedback);
    Dar<double> op;
    op.score.converged = true;
    op.score.feedback = feedback;
    check_form(op);
  }
}

TEMPLATE_TEST_CASE("the fast form's fixed point is the formula's up to slope bound 1", "", float,
                   double) {
  using P = Pack<TestType>;
  const detail::AnyRoot formula{{GateKind::logistic}};
  for (const double feedback : {-0.4999, 0.3, 0.49, 0.499, 0.4999}) {
    const GateScalars<P> p{P(TestType(0.6)), P(TestType(8)), P(TestType(feedback))};
    const double margin = 1 - std::max(0.0, 2 * feedback);  // of the slope bound, 8 feedback / 4
    double worst = 0;
    // Near x = beta / 2, where the root is 1/2 and moves most, and far from it.
    for (double distance = 1e-7; std::abs(distance) < 2; distance *= -1.2) {
      const P fall = P(TestType(feedback / 2)) +
                     (P(TestType(1)) + P::iota() * P(TestType(0.01))) * P(TestType(distance));
      const P fast = detail::FastRoot{}.root(fall, p), exact = formula.root(fall, p);
      for (int i = 0; i < kLanes<TestType>; ++i)
        worst = std::max(worst, std::abs(double(fast.lane(i)) - double(exact.lane(i))));
    }
    INFO("feedback " << feedback << ", off by " << worst);
    CHECK(worst < 4 * std::numeric_limits<TestType>::epsilon() / margin);
  }
}
