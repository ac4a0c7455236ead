// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/resonant_ode.hpp>

namespace heed_test {

namespace {

bool at_equilibrium(const GoldenCase& golden) { return golden.variant() == "ode_equilibrium"; }

template <class T>
heed::ResonantOde<T> ode_of(const GoldenCase& golden) {
  heed::ResonantOde<T> op;
  op.score.rho = golden.param<T>("rho");
  op.normaliser.eta = golden.param<T>("eta");
  if (at_equilibrium(golden))
    op.normaliser.mode = heed::FlowMode::equilibrium;
  else
    op.normaliser.steps = int(golden.integer("n_steps"));
  return op;
}

// The part of the drive that is constant in a row, -rho |q_i|^2: the op leaves it out.
std::vector<double> row_constants(const heed::ResonantOde<double>& op, const GoldenCase& golden) {
  const heed::Geometry g = golden.geometry();
  const std::vector<double>& q = golden.tensor("q");
  std::vector<double> constants;
  for (Index row = 0; row < g.query_rows(); ++row) {
    double square = 0;
    for (Index c = 0; c < g.dim_qk; ++c)
      square += q[std::size_t(row * g.dim_qk + c)] * q[std::size_t(row * g.dim_qk + c)];
    constants.push_back(-op.score.rho.head(row / g.len_q % g.heads) * square);
  }
  return constants;
}

// The stored drive has no mask: it is compared with the reference's scores without one.
void check_drive(const heed::ResonantOde<double>& op, const GoldenCase& golden, Report& report) {
  auto problem = golden.problem<double>();
  problem.mask = {};
  heed::reference::Request request;
  request.scores = true;
  std::vector<double> drive = heed::reference::forward(op, problem, request).scores[0];
  const std::vector<double> constants = row_constants(op, golden);
  const std::size_t keys = std::size_t(golden.geometry().len_kv);
  for (std::size_t i = 0; i < drive.size(); ++i) drive[i] += constants[i / keys];
  report.exact("drive", drive, golden.tensor("drive"));
}

// The stored argument of the last softmax is (1 - eta) a + eta drive; before the first step a is 1/Tk.
void check_lse(const heed::ResonantOde<double>& op, const GoldenCase& golden, Report& report) {
  const heed::Geometry g = golden.geometry();
  std::vector<double> lse = run_engine(op, golden).saved.lse;
  const std::vector<double> constants = row_constants(op, golden);
  const bool first = !at_equilibrium(golden) && golden.integer("n_steps") == 1;
  for (Index row = 0; row < g.query_rows(); ++row) {
    const double eta = op.normaliser.eta.head(row / g.len_q % g.heads);
    lse[std::size_t(row)] += eta * constants[std::size_t(row)];
    if (first) lse[std::size_t(row)] += (1 - eta) / double(g.len_kv);
  }
  report.exact("lse", lse, golden.tensor("lse"));
}

void check_steps(heed::ResonantOde<double> op, const GoldenCase& golden, Report& report) {
  std::vector<double> steps;
  for (int n = 1; n <= int(golden.integer("n_steps")); ++n) {
    op.normaliser.steps = n;
    const std::vector<double> weights = engine_weights(op, golden);
    steps.insert(steps.end(), weights.begin(), weights.end());
  }
  report.exact("alpha_steps", steps, golden.tensor("alpha_steps"));
}

}  // namespace

void replay_ode(const GoldenCase& golden, Report& report) {
  check_operator(golden, {{"eta", "deta"}, {"rho", "drho"}}, report,
                 [&]<class T>() { return ode_of<T>(golden); });
  const auto op = ode_of<double>(golden);
  check_lse(op, golden, report);
  if (golden.has("alpha"))
    report.exact("alpha", engine_weights(op, golden), golden.tensor("alpha"));
  if (golden.has("drive")) check_drive(op, golden, report);
  if (golden.has("alpha_steps")) check_steps(op, golden, report);
}

}  // namespace heed_test
