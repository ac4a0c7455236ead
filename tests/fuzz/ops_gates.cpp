// SPDX-License-Identifier: Apache-2.0
// Ops with a readout: intent gates, and the dialectical recursion.

#include "fuzz/op.hpp"
#include "fuzz/plain_ops.hpp"

namespace fuzz {
namespace {

// A gate is at most 1, so that an error of the mixed row does not grow.
[[nodiscard]] std::unique_ptr<AnyOp> gated(std::unique_ptr<AnyOp> op) {
  op->terms_known = true;
  return op;
}

// Draws grain and bias; returns the columns of the gate.
template <class Readout>
Index draw_gate(Draw& draw, const Sizes& s, Readout& readout, IntentFormula& f) {
  f.per_head = draw.chance(0.4);
  readout.grain = f.per_head ? heed::GateGrain::per_head : heed::GateGrain::elementwise;
  if (draw.chance(0.5)) readout.bias = draw_param(draw, s, -1, 1);
  return f.per_head ? 1 : s.dim_v;
}
[[nodiscard]] std::string grain_of(const IntentFormula& f) {
  return f.per_head ? "per head" : "elementwise";
}

}  // namespace

std::unique_ptr<AnyOp> draw_intent(Draw& draw, Sizes& s) {
  heed::IntentGated<double> op;
  IntentFormula f;
  s.extra = draw_gate(draw, s, op.readout, f);
  return gated(make_op(op, f, grain_of(f)));
}

std::unique_ptr<AnyOp> draw_intent_from_q(Draw& draw, Sizes& s) {
  heed::IntentFromQ<double> op;
  IntentFormula f;
  f.form = IntentFormula::from_query;
  const Index columns = draw_gate(draw, s, op.readout, f);
  op.readout.weight =
      draw_tensor(draw, {s.heads, s.dim_qk, columns}, 1 / std::sqrt(double(s.dim_qk)));
  return gated(make_op(op, f, grain_of(f)));
}

std::unique_ptr<AnyOp> draw_intent_calculated(Draw& draw, Sizes& s) {
  s.len_kv = std::max(s.len_kv, s.len_q);
  heed::IntentCalc<double> op;
  IntentFormula f;
  f.form = IntentFormula::calculated;
  const Index columns = draw_gate(draw, s, op.readout, f);
  const double spread = 1 / std::sqrt(double(s.dim_qk));
  op.readout.query_weight = draw_tensor(draw, {s.heads, s.dim_qk, columns}, spread);
  op.readout.key_weight = draw_tensor(draw, {s.heads, s.dim_qk, columns}, spread);
  op.readout.value_weight =
      draw_tensor(draw, {s.heads, s.dim_v, columns}, 1 / std::sqrt(double(s.dim_v)));
  return gated(make_op(op, f, grain_of(f)));
}

std::unique_ptr<AnyOp> draw_dialectical(Draw& draw, Sizes& s) {
  s.dim_v = s.dim_qk;
  const Index d = s.dim_qk;
  heed::Dialectical<double> op;
  DialecticalFormula f;
  auto& p = op.readout;
  const double spread = 1 / std::sqrt(double(d));
  p.v_pos = draw_tensor(draw, {d, d}, spread);
  p.v_neg = draw_tensor(draw, {d, d}, spread);
  p.synth = draw_tensor(draw, {d, 3 * d}, spread);
  p.synth_bias = draw_tensor(draw, {d}, 0.3);
  p.gate = draw_tensor(draw, {1, d}, spread);
  p.gate_bias = draw_tensor(draw, {1}, 0.5);
  p.b_pos = draw_tensor(draw, {1}, 1);
  p.b_neg = draw_tensor(draw, {1}, 1);
  p.max_steps = f.max_steps = int(draw.between(1, 4));
  p.halt_eps = f.halt_eps = draw.pick({0.0, 1e-3, 0.05, 0.3});
  f.whole_batch = draw.chance(0.3);
  p.halting = f.whole_batch ? heed::Halting::batch : heed::Halting::per_token;
  const std::string steps = std::to_string(f.max_steps) + " steps, ";
  if (!f.whole_batch && draw.chance(0.5)) {
    f.adaptive = true;
    p.halting = heed::Halting::adaptive;
    p.spare_eps = f.spare_eps = draw.pick({0.0, 0.01, 0.2});
    p.halt = draw_tensor(draw, {s.heads, d}, spread);
    p.halt_bias = draw_tensor(draw, {s.heads}, 1);
    return make_op(op, f, steps + "adaptive, spare " + std::to_string(f.spare_eps));
  }
  return make_op(op, f,
                 steps + "eps " + std::to_string(f.halt_eps) +
                     (f.whole_batch ? ", whole batch" : ", per token"));
}

}  // namespace fuzz
