// SPDX-License-Identifier: Apache-2.0
// check_causality() passes causal ops, and names the tensor, numbers of tokens among them, that
// carries a later token to an earlier output.

#include "catch.hpp"
#include "forgetting_score.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"

#include <heed/check/op_causality.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::Forgetting, heed_test::message_of, heed_test::moving_dialectical;

// Numbers of query and key, of the score and of a normaliser of whole rows.
template <class T>
struct Boosted {
  using Features = TokenInputs<1, 1>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0] + pair.key[0];
  }
};
template <class T>
struct Damped : PlainRows {
  static constexpr int query_inputs = 1, key_inputs = 1;
  auto forward(const auto& row) const {
    return row.softmax(row.score()) * math::sigmoid(row.key_input(0)) * row.query_input(0);
  }
};
using Reads = Attention<double, OwnScore<Boosted, double>, Damped<double>, Identity<double>>;

[[nodiscard]] std::vector<std::string> names_of(const OpCausalityReport& report) {
  std::vector<std::string> names;
  for (const auto& [name, of_tensor] : report.tensors) names.push_back(name);
  return names;
}

// Every tensor has an effect, and none changes an earlier output.
template <class Op>
void check_causal(const Op& op, const std::vector<std::string>& names) {
  const OpCausalityReport report = check_causality(op);
  INFO(report.text());
  CHECK(report.causal());
  CHECK(names_of(report) == names);
  for (const auto& [name, of_tensor] : report.tensors) {
    INFO(name);
    CHECK(of_tensor.runs == 2 * 11 * 5);
    CHECK(of_tensor.effective > 80);
  }
}

}  // namespace

TEST_CASE("Causal ops pass check_causality with every tensor that they read", "[op_causality]") {
  check_causal(ScaledDot<float>{}, {"query", "key", "value"});
  check_causal(IntentGated<float>{}, {"query", "key", "value", "extra"});
  check_causal(OwnAttention<Forgetting, float>{}, {"query", "key", "value", "key_inputs"});
  check_causal(Reads{}, {"query", "key", "value", "query_inputs", "key_inputs"});

  // An op whose rows take steps; the share of each row is an output, too.
  const Geometry g{2, 4, 4, 2, 11, 11, 6, 6};
  check_causal(moving_dialectical<double>(g, {.halting = Halting::adaptive}),
               {"query", "key", "value"});
}

TEST_CASE("check_causality tells the tensors that bring later tokens to earlier outputs",
          "[op_causality]") {
  const auto leaking = [](const OpCausalityReport& report) {
    std::vector<std::string> names;
    for (const auto& [name, of_tensor] : report.tensors)
      if (!of_tensor.causal) names.push_back(name);
    return names;
  };
  // Each query sees the key behind its own.
  const OpCausalityReport one_later =
      check_causality(Reads{}, {1, 2, 2, 1, 6, 6, 4, 3}, window<double>(-1, 1));
  INFO(one_later.text());
  CHECK_FALSE(one_later.causal());
  CHECK(leaking(one_later) == std::vector<std::string>{"key", "value", "key_inputs"});
  CHECK(one_later.text().find("key_inputs: not causal: token 5 of sequence 0 set to 1e30; output "
                              "(0, 4, 0)") != std::string::npos);

  // Rows that wait until all of them have halted.
  const Geometry g{2, 4, 4, 2, 11, 11, 6, 6};
  DialecticalOptions options{.max_steps = 5, .halt_eps = 0.3};
  CHECK(check_causality(moving_dialectical<double>(g, options), g).causal());
  options.halting = Halting::batch;
  CHECK_FALSE(check_causality(moving_dialectical<double>(g, options), g).causal());
}

TEST_CASE("check_causality refuses queries that do not stand at their keys", "[op_causality]") {
  CHECK(message_of([&] {
          (void)check_causality(ScaledDot<double>{}, {1, 1, 1, 1, 4, 5, 2, 2, 1});
        }) ==
        "check_causality: the geometry has len_q 4, len_kv 5 and first_query 1; query i must "
        "stand at key i");
  CHECK(message_of([&] {
          (void)check_causality(ScaledDot<double>{}, {1, 3, 3, 2, 4, 4, 2, 2});
        }) == "check_causality: 3 heads cannot share 2 kv_heads evenly");
}
