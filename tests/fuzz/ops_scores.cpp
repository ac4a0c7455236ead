// SPDX-License-Identifier: Apache-2.0
// Ops with a score of their own, whose rows are softmax or a flow: plain attention, DAR, the resonant ODE, prototypes.

#include "fuzz/op.hpp"
#include "fuzz/plain_ops.hpp"

#include <string>

namespace fuzz {
namespace {

// (dim, rank) with orthonormal columns: the first ones of a reflection.
[[nodiscard]] heed::Param<double> draw_basis(Draw& draw, Index dim, Index rank) {
  std::vector<double> u(std::size_t(dim), 0.0);
  double square = 0;
  for (double& x : u) x = draw.uniform(0.5, 1.5), square += x * x;
  heed::Param<double> basis(std::vector<Index>{dim, rank});
  for (Index i = 0; i < dim; ++i)
    for (Index r = 0; r < rank; ++r)
      basis[i * rank + r] =
          double(float((i == r ? 1.0 : 0.0) - 2 * u[std::size_t(i)] * u[std::size_t(r)] / square));
  return basis;
}

[[nodiscard]] std::unique_ptr<AnyOp> draw_dar_mode(Draw& draw, Sizes& s, bool converged) {
  heed::Dar<double> op;
  DarFormula f;
  op.score.strength = draw_param(draw, s, -1, 2);
  op.score.vigilance = draw_param(draw, s, -0.2, 0.8);
  op.score.sharpness = draw_param(draw, s, 0.5, converged ? 2 : 12);
  op.score.feedback = draw_param(draw, s, -0.4, 0.4);
  const int kind = draw.chance(0.5) ? 0 : int(draw.below(4));
  constexpr heed::GateKind kinds[] = {heed::GateKind::logistic, heed::GateKind::centred,
                                      heed::GateKind::tanh, heed::GateKind::piecewise_linear};
  op.score.gate = kinds[kind];
  f.gate = DarFormula::Gate(kind);
  op.score.iterations = f.iterations = int(draw.below(5));
  op.score.converged = f.converged = converged;
  op.score.adaptive = f.adaptive = draw.chance(0.25);
  f.safe = draw.chance(0.25);
  op.score.zero_norm = f.safe ? heed::ZeroNorm::safe : heed::ZeroNorm::regularised;
  if (draw.chance(0.25)) {
    f.rank = draw.between(1, s.dim_qk);
    op.score.basis = draw_basis(draw, s.dim_qk, f.rank);
    f.basis = {op.score.basis.data(), op.score.basis.data() + op.score.basis.size()};
  }
  const std::string text = "gate " + std::to_string(kind) + ", iterations " +
                           std::to_string(f.iterations) + (f.converged ? ", converged" : "") +
                           (f.adaptive ? ", adaptive" : "") + ", rank " + std::to_string(f.rank) +
                           (f.safe ? ", safe zero rows" : "");
  auto made = make_op(op, f, text);
  made->short_rows = true;
  if (!op.score.basis.given()) {
    const double steepness = op.score.resonance_gate().steepness(),
                 once = largest_of(op.score.sharpness) * steepness,
                 again = once * largest_of(op.score.feedback);
    double slope = once;
    for (int t = 1; t < f.iterations; ++t) slope = once + again * slope;
    if (converged) slope = once / (1 - again);
    made->mixed_largest = largest_of(op.score.strength);
    made->mixed_slope = made->mixed_largest * slope * op.score.resonance_gate().input_slope();
  }
  made->steep_zeros = !f.safe;
  return made;
}

}  // namespace

std::unique_ptr<AnyOp> draw_sdpa(Draw&, Sizes&) {
  auto op = make_op(heed::ScaledDot<double>{}, SdpaFormula{});
  op->softmax_rows = true;
  return op;
}
std::unique_ptr<AnyOp> draw_dar(Draw& draw, Sizes& s) { return draw_dar_mode(draw, s, false); }
std::unique_ptr<AnyOp> draw_dar_converged(Draw& draw, Sizes& s) {
  return draw_dar_mode(draw, s, true);
}

namespace {

[[nodiscard]] std::unique_ptr<AnyOp> draw_ode_mode(Draw& draw, Sizes& s, OdeFormula::Mode mode) {
  constexpr heed::FlowMode modes[] = {heed::FlowMode::steps, heed::FlowMode::equilibrium,
                                      heed::FlowMode::lagrange,
                                      heed::FlowMode::lagrange_equilibrium};
  heed::ResonantOde<double> op;
  OdeFormula f;
  f.mode = mode;
  op.normaliser.mode = modes[int(mode)];
  op.normaliser.steps = f.steps = int(draw.between(1, 5));
  op.score.rho = draw_param(draw, s, -0.2, 0.5);
  op.normaliser.eta =
      draw_param(draw, s, 0.1, mode == OdeFormula::lagrange_equilibrium ? 1.9 : 2.0);
  if (mode == OdeFormula::flow && draw.chance(0.2)) op.normaliser.eta = 1.0;
  auto made =
      make_op(op, f, "mode " + std::to_string(int(mode)) + ", steps " + std::to_string(f.steps));
  made->reads_squares = true;
  made->mixed_per_product = 2 * largest_of(op.score.rho);
  if (mode == OdeFormula::flow || mode == OdeFormula::equilibrium) {
    double kappa = 0;
    for (Index h = 0; h < op.normaliser.eta.size(); ++h)
      kappa = std::max(kappa, std::abs(1 - op.normaliser.eta[h]));
    made->mixed_flow = largest_of(op.normaliser.eta) / (1 - kappa / 2);
  }
  made->linear_rows = mode == OdeFormula::lagrange || mode == OdeFormula::lagrange_equilibrium;
  return made;
}

}  // namespace

std::unique_ptr<AnyOp> draw_ode(Draw& draw, Sizes& s) {
  return draw_ode_mode(draw, s,
                       draw.pick({OdeFormula::flow, OdeFormula::flow, OdeFormula::lagrange,
                                  OdeFormula::lagrange_equilibrium}));
}
std::unique_ptr<AnyOp> draw_ode_equilibrium(Draw& draw, Sizes& s) {
  return draw_ode_mode(draw, s, OdeFormula::equilibrium);
}

std::unique_ptr<AnyOp> draw_prototype(Draw& draw, Sizes& s) {
  s.dim_v = s.dim_qk;
  const Index most = draw.below(6);
  heed::Prototype<double> op =
      heed::make_prototype<double>(heed::Geometry{.heads = s.heads, .dim_qk = s.dim_qk}, most);
  if (most > 0) op.score.W = draw_tensor(draw, {s.heads, most, s.dim_qk}, 1);
  PrototypeFormula f;
  f.most = most;
  f.counts.assign(std::size_t(s.heads), most);
  if (draw.chance(0.3)) {
    for (Index& count : f.counts) count = draw.between(0, most);
    op.score.counts = f.counts;
  }
  op.score.strength = draw_param(draw, s, -1, 2);
  op.readout.pull = draw_param(draw, s, -0.5, 1);
  auto made = make_op(op, f, std::to_string(most) + " prototypes");
  made->short_rows = made->steep_zeros = made->terms_known = true;
  return made;
}

}  // namespace fuzz
