// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/intent_gate.hpp>
#include <heed/ops/scaled_dot.hpp>

namespace heed_test {

namespace {

template <class T>
heed::IntentFromQ<T> from_q(const GoldenCase& golden) {
  heed::IntentFromQ<T> op;
  op.readout.weight = golden.param<T>("Wg");
  return op;
}

template <class T>
heed::IntentCalc<T> calculated(const GoldenCase& golden) {
  heed::IntentCalc<T> op;
  op.readout.query_weight = golden.param<T>("Wq");
  op.readout.key_weight = golden.param<T>("Wk");
  op.readout.value_weight = golden.param<T>("Wv");
  return op;
}

// The stored logits and ungated rows must give the output of the fast gate.
void check_gate(const GoldenCase& golden, Report& report, const std::vector<double>& out) {
  std::vector<double> gated = golden.tensor("gate_logits");
  for (std::size_t i = 0; i < gated.size(); ++i)
    gated[i] = heed::math::sigmoid(gated[i]) * golden.tensor("attn_out")[i];
  report.exact("gate_logits", out, gated);
}

}  // namespace

void replay_intent(const GoldenCase& golden, Report& report) {
  const std::string& gate = golden.text("gate");
  std::vector<double> out;
  if (gate == "intent") {
    check_operator(golden, {}, report, []<class T>() { return heed::IntentGated<T>{}; });
    out = run_engine(heed::IntentGated<double>{}, golden).out;
  } else if (gate == "from_q") {
    check_operator(golden, {{"gate.weight", "dWg"}}, report,
                   [&]<class T>() { return from_q<T>(golden); });
    out = run_engine(from_q<double>(golden), golden).out;
  } else if (gate == "calc") {
    const ParamNames names = {
        {"gate.query_weight", "dWq"}, {"gate.key_weight", "dWk"}, {"gate.value_weight", "dWv"}};
    check_operator(golden, names, report, [&]<class T>() { return calculated<T>(golden); });
    out = run_engine(calculated<double>(golden), golden).out;
  } else {
    return report.fail("the gate " + gate + " is unknown");
  }
  const heed::ScaledDot<double> plain;
  const auto ungated = run_engine(plain, golden);
  report.exact("attn_out", ungated.out, golden.tensor("attn_out"));
  report.exact("lse", ungated.saved.lse, golden.tensor("lse"));
  check_gate(golden, report, out);
  if (golden.has("attn"))
    report.exact("attn", engine_weights(plain, golden), golden.tensor("attn"));
}

}  // namespace heed_test
