// SPDX-License-Identifier: Apache-2.0
// Numbers of tokens that scores read, and their sums over tokens: against plain loops and the slow twin.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_check.hpp>
#include <heed/plug/own_score.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

// Two numbers of each query, one of each key.
struct Temperatures : TokenInputs<2, 1> {
  static constexpr const char *query_inputs_name = "temperature", *key_inputs_name = "boost";
};
template <class Real>
struct Tempered {
  using Features = Temperatures;
  Param<Real> strength = Real(0.3);
  static constexpr auto parameters = std::tuple{named("strength", &Tempered::strength)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * pair.query[0] + pair.query[1] * pair.key[0] + p[0] * pair.key[0];
  }
};

// logit + F_i - F_j, F the sums of log sigmoid of key_inputs.
template <class Real>
struct Forgetting {
  using Features = CumulativeInputs<1, LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.query[0] - pair.key[0];
  }
};

// Reads sums so that those of queries do not cancel in a softmax, and two of them.
template <class Real>
struct Damped {
  using Features = CumulativeInputs<2>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * math::sigmoid(S(pair.query[0] - pair.key[0])) +
           pair.query[1] * pair.key[1] * math::constant<S>(0.1);
  }
};

template <template <class> class Score, class Real>
using Own = OwnAttention<Score, Real>;

template <class Op>
void check(const Op& op) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 35, 67, 3, 5}}) {
    const OpReport report = check_op(op, g, {.max_entries_per_tensor = 12});
    INFO(report.text());
    CHECK(report.passed());
    CHECK(report.cases.size() >= 10);
    CHECK(report.text().find("FAILED") == std::string::npos);
  }
}

}  // namespace

TEST_CASE("Scores that read numbers of tokens agree with the twin", "[token_inputs]") {
  SECTION("of queries and keys") { check(Own<Tempered, double>{}); }
  SECTION("sums of keys") { check(Own<Forgetting, double>{}); }
  SECTION("two sums each") { check(Own<Damped, double>{}); }
}
