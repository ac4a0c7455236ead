// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/differential.hpp>

namespace heed_test {

namespace {

// Both maps from the fast path: lambda = 0 leaves the first, lambda = 1 takes the second off it.
void check_maps(const GoldenCase& golden, Report& report) {
  heed::Differential<double> op;
  op.normaliser.lambda = 0.0;
  const std::vector<double> first = engine_weights(op, golden);
  op.normaliser.lambda = 1.0;
  std::vector<double> second = engine_weights(op, golden);
  for (std::size_t i = 0; i < first.size(); ++i) second[i] = first[i] - second[i];
  if (golden.has("attn1")) report.exact("attn1", first, golden.tensor("attn1"));
  if (golden.has("attn2")) report.exact("attn2", second, golden.tensor("attn2"));
}

template <class T>
void check_lse(const heed::Saved<T>& saved, const GoldenCase& golden, Report& report) {
  const auto middle = saved.lse.begin() + std::ptrdiff_t(saved.lse.size() / 2);
  report.exact("lse1", std::vector<T>(saved.lse.begin(), middle), golden.tensor("lse1"));
  report.exact("lse2", std::vector<T>(middle, saved.lse.end()), golden.tensor("lse2"));
}

template <class T>
heed::DifferentialV1<T> v1_of(const GoldenCase& golden) {
  heed::DifferentialV1<T> op;
  op.normaliser.lambda_init = golden.number("lambda_init");
  op.normaliser.lambda_q1 = golden.param<T>("lq1");
  op.normaliser.lambda_k1 = golden.param<T>("lk1");
  op.normaliser.lambda_q2 = golden.param<T>("lq2");
  op.normaliser.lambda_k2 = golden.param<T>("lk2");
  op.readout.factor = 1.0 - op.normaliser.lambda_init;
  op.readout.eps = golden.number("rms_eps");
  if (golden.flag("has_weight")) op.readout.weight = golden.param<T>("weight");
  return op;
}

}  // namespace

void replay_differential(const GoldenCase& golden, Report& report) {
  const auto build = [&]<class T>() {
    heed::Differential<T> op;
    op.normaliser.lambda = golden.param<T>("lambda");
    return op;
  };
  check_operator(golden, {{"lambda", "dlambda"}}, report, build);
  check_lse(run_engine(build.operator()<double>(), golden).saved, golden, report);
  check_maps(golden, report);
}

void replay_differential_v1(const GoldenCase& golden, Report& report) {
  const ParamNames names = {{"lambda_q1", "dlq1"},
                            {"lambda_k1", "dlk1"},
                            {"lambda_q2", "dlq2"},
                            {"lambda_k2", "dlk2"},
                            {"weight", "dweight"}};
  check_operator(golden, names, report, [&]<class T>() { return v1_of<T>(golden); });
  const auto op = v1_of<double>(golden);
  const auto run = run_engine(op, golden);
  check_lse(run.saved, golden, report);
  report.exact("out_prenorm", run.saved.mixed, golden.tensor("out_prenorm"));
  report.exact("lam", std::vector<double>{op.normaliser.lambda_of(0, 0.0)}, golden.tensor("lam"));
  check_maps(golden, report);
}

}  // namespace heed_test
