// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/measure/resonance.hpp>
#include <heed/ops/dar.hpp>

namespace heed_test {

namespace {

heed::GateKind gate_of(const GoldenCase& golden) {
  const std::map<std::string, heed::GateKind> kinds = {{"logistic", heed::GateKind::logistic},
                                                       {"centered", heed::GateKind::centred},
                                                       {"tanh", heed::GateKind::tanh},
                                                       {"plin", heed::GateKind::piecewise_linear}};
  const auto found = kinds.find(golden.text("gate"));
  heed::require(found != kinds.end(), golden.path(), ": the gate ", golden.text("gate"),
                " is unknown");
  return found->second;
}

template <class T>
heed::Dar<T> dar_of(const GoldenCase& golden) {
  heed::Dar<T> op;
  op.score.gate = gate_of(golden);
  op.score.iterations = int(golden.integer("iters"));
  op.score.eps = golden.number("eps");
  op.score.adaptive = golden.flag("adaptive");
  op.score.strength = golden.param<T>("lam");
  op.score.vigilance = golden.param<T>("rho");
  op.score.sharpness = golden.param<T>("alpha");
  op.score.feedback = golden.param<T>("beta");
  if (golden.has("P")) op.score.basis = golden.param<T>("P");
  return op;
}

// |lambda| alpha / 4 bounds the slope of the score in the cosine.
double steepness_of(const GoldenCase& golden) {
  return Report::largest(golden.tensor("lam")) * Report::largest(golden.tensor("alpha")) / 4;
}

std::vector<double> map_of(const heed::Dar<double>& op, const GoldenCase& golden) {
  const heed::Geometry g = golden.geometry();
  std::vector<double> map(std::size_t(g.query_rows() * g.len_kv));
  heed::resonance_map(op, {golden.tensor("q").data(), golden.shape("q")},
                      {golden.tensor("k").data(), golden.shape("k")},
                      {map.data(), {g.batch, g.heads, g.len_q, g.len_kv}});
  return map;
}

// A straight gate shows the cosine itself: clip(c / 4 + 1/2) = c / 4 + 1/2.
std::vector<double> cosines_of(heed::Dar<double> op, const GoldenCase& golden) {
  op.score.gate = heed::GateKind::piecewise_linear;
  op.score.iterations = 0;
  op.score.sharpness = 0.25;
  op.score.vigilance = 0.0;
  std::vector<double> cosines = map_of(op, golden);
  for (double& c : cosines) c = 4 * (c - 0.5);
  return cosines;
}

}  // namespace

void replay_dar(const GoldenCase& golden, Report& report) {
  const ParamNames names = {
      {"strength", "dlam"}, {"vigilance", "drho"}, {"sharpness", "dalpha"}, {"feedback", "dbeta"}};
  check_operator(
      golden, names, report, [&]<class T>() { return dar_of<T>(golden); }, steepness_of(golden));
  const auto op = dar_of<double>(golden);
  report.exact("lse", run_engine(op, golden).saved.lse, golden.tensor("lse"));
  if (golden.has("attn")) report.exact("attn", engine_weights(op, golden), golden.tensor("attn"));
  if (golden.has("r")) report.exact("r", map_of(op, golden), golden.tensor("r"));
  if (golden.has("cos")) report.exact("cos", cosines_of(op, golden), golden.tensor("cos"));
  if (golden.has("dq_safe")) {
    auto safe = op;
    safe.score.zero_norm = heed::ZeroNorm::safe;
    const auto run = run_engine(safe, golden);
    report.exact("dq_safe", run.grad_query, golden.tensor("dq_safe"));
    report.exact("dk_safe", run.grad_key, golden.tensor("dk_safe"));
  }
}

}  // namespace heed_test
