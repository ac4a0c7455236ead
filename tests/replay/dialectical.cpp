// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/dialectical.hpp>

namespace heed_test {

namespace {

heed::Halting halting_of(const GoldenCase& golden) {
  const std::string& halting = golden.text("halting");
  heed::require(halting == "seed" || halting == "freeze", golden.path(), ": halting is ", halting,
                ", it must be seed or freeze");
  return halting == "seed" ? heed::Halting::batch : heed::Halting::per_token;
}

// The halting unit is not the source's.
bool of_source(const std::string& param) { return !param.starts_with("halt."); }

template <class T>
heed::Dialectical<T> dialectical_of(const GoldenCase& golden) {
  heed::Dialectical<T> op;
  op.readout.halting = halting_of(golden);
  op.readout.max_steps = int(golden.integer("max_steps"));
  op.readout.halt_eps = golden.number("halt_eps");
  visit_parameters(op.readout, [&](const char* name, heed::Param<T>& p) {
    if (of_source(name)) p = golden.param<T>(std::string("param.") + name);
  });
  return op;
}

ParamNames gradient_names() {
  ParamNames names;
  heed::DialecticalReadout<double> shapes;
  visit_parameters(shapes, [&](const char* name, auto&) {
    if (of_source(name)) names[name] = std::string("grad.") + name;
  });
  return names;
}

// rows x weight^T for a (out, in) weight.
std::vector<double> times(const std::vector<double>& rows, const heed::Param<double>& weight) {
  const Index out = weight.extent(0), in = weight.extent(1);
  std::vector<double> product;
  for (Index row = 0; row < Index(rows.size()) / in; ++row)
    for (Index o = 0; o < out; ++o) {
      double sum = 0;
      for (Index i = 0; i < in; ++i) sum += weight[o * in + i] * rows[std::size_t(row * in + i)];
      product.push_back(sum);
    }
  return product;
}

double length(const double* row, Index dim) {
  double sum = 0;
  for (Index c = 0; c < dim; ++c) sum += row[c] * row[c];
  return std::sqrt(sum);
}

// |step| / (|z| + 1e-6) of every row, in plain loops: halted rows, too, have a proposal.
std::vector<double> deltas(const heed::Dialectical<double>& op, const std::vector<double>& z,
                           const GoldenCase& golden) {
  const auto& p = op.readout;
  const Index d = golden.geometry().dim_v, rows = golden.geometry().query_rows();
  const auto &up = golden.tensor("up"), &un = golden.tensor("un");
  std::vector<double> all;
  for (Index row = 0; row < rows; ++row) {
    const double* zr = z.data() + row * d;
    double gate = p.gate_bias[0];
    for (Index c = 0; c < d; ++c) gate += p.gate[c] * zr[c];
    gate = heed::math::sigmoid(gate) * golden.tensor("tension")[std::size_t(row)];
    std::vector<double> step;
    for (Index o = 0; o < d; ++o) {
      double x = p.synth_bias[o];
      for (Index c = 0; c < d; ++c)
        x += p.synth[o * 3 * d + c] * up[std::size_t(row * d + c)] +
             p.synth[o * 3 * d + d + c] * un[std::size_t(row * d + c)] +
             p.synth[o * 3 * d + 2 * d + c] * zr[c];
      step.push_back(gate * x * heed::math::sigmoid(x));
    }
    all.push_back(length(step.data(), d) / (length(zr, d) + 1e-6));
  }
  return all;
}

// z after 1, 2, ... executed steps, by runs that are allowed so many.
void check_recursion(heed::Dialectical<double> op, const GoldenCase& golden, Report& report) {
  const Index executed = golden.integer("n_exec");
  std::vector<double> z = golden.tensor("q"), z_steps, delta_steps;
  for (Index n = 1; n <= executed; ++n) {
    const std::vector<double> delta = deltas(op, z, golden);
    delta_steps.insert(delta_steps.end(), delta.begin(), delta.end());
    op.readout.max_steps = int(n);
    z = run_engine(op, golden).out;
    z_steps.insert(z_steps.end(), z.begin(), z.end());
  }
  report.exact("delta_steps", delta_steps, golden.tensor("delta_steps"));
  if (golden.has("z_steps")) report.exact("z_steps", z_steps, golden.tensor("z_steps"));
}

// Decisions must agree in every precision: the stored margins are far above float's rounding.
template <class T>
void check_decisions(const heed::Saved<T>& saved, const GoldenCase& golden, Report& report) {
  report.equal("steps_used", saved.diagnostic("steps_used"), golden.tensor("steps_used"));
  report.equal("updates", saved.diagnostic("updates"), golden.tensor("updates"));
}

}  // namespace

void replay_dialectical(const GoldenCase& golden, Report& report) {
  check_operator(golden, gradient_names(), report,
                 [&]<class T>() { return dialectical_of<T>(golden); });
  const auto op = dialectical_of<double>(golden);
  const auto run = run_engine(op, golden);
  check_decisions(run.saved, golden, report);
  check_decisions(run_engine(dialectical_of<float>(golden), golden).saved, golden, report);
  report.exact("up", times(run.saved.mixed, op.readout.v_pos), golden.tensor("up"));
  report.exact("un", times(run.saved.mixed, op.readout.v_neg), golden.tensor("un"));
  std::vector<double> lse = run.saved.lse;
  for (double& x : lse) x += op.readout.b_pos[0];
  report.exact("lse", lse, golden.tensor("lse"));
  if (golden.has("attn")) report.exact("attn", engine_weights(op, golden), golden.tensor("attn"));

  const std::vector<double>& tension = run.saved.diagnostic("tension");
  report.exact("tension", tension, golden.tensor("tension"));
  double mean_tension = 0, mean_steps = 0;
  for (const double t : tension) mean_tension += t / double(tension.size());
  for (const double s : run.saved.diagnostic("steps_used"))
    mean_steps += s / double(tension.size());
  report.exact("tensions", std::vector<double>(golden.tensor("tensions").size(), mean_tension),
               golden.tensor("tensions"));
  report.exact("avg_steps", std::vector<double>{mean_steps}, golden.tensor("avg_steps"));
  check_recursion(op, golden, report);
}

}  // namespace heed_test
