// SPDX-License-Identifier: Apache-2.0
#pragma once

// Intent gates: a sigmoid decides, column by column or for a whole row, how much of the mixed values passes. It reads the
// intent I, which is an input beside query, key and value, or is computed from them.
//
//   I = given                               an input of its own                            IntentGate
//     = q_i Wg                              from the query                                 IntentFromQuery
//         dq_i += dI_i Wg^T                 dWg = sum_i q_i^T dI_i
//     = q_i Wq + k_i Wk + v_i Wv            from query, key and value of the own row       IntentCalculated
//         the same for (q, Wq), (k, Wk) and (v, Wv)
//   s = sigmoid(I + b0)
//         dI = dout o mixed o s (1 - s)     db0 = sum dI
//   out_i = s_i o mixed_i
//         dmixed = dout o s                 delta = rowsum(dmixed o mixed)
//
// Backward needs no mixed rows: dI = dout o out o (1 - s), delta = rowsum(dout o out), and 1 - s is computed as
// sigmoid(-I - b0), not as a difference.
//
// Grain    elementwise: I has dim_v columns. per_head: one column, which gates the whole row; dI is
//          then summed over the row.
// Shapes   I (batch, heads, len_q, dim_v or 1); Wg, Wq, Wk (heads, dim_qk, dim_v or 1), Wv (heads,
//          dim_v, dim_v or 1); b0 one value, one per head, or none: b0 > 0 starts with open gates.
// Bounds   0 <= s <= 1: |out| <= |mixed|; a row that sees no key stays 0 and gives I no gradient. A
//          calculated gate reads its own key and value whether or not the mask shows them to the
//          query; they must be at hand (Inputs::first_query).
// Accuracy s and 1 - s within 4 eps of themselves, in both tails, down to exp(-87) (float).
//          errors of out, gradients on hard inputs (README.md beside this file):
//          accuracy of intent             float 6e-6, 9e-5; double 9e-15, 2e-13
//          accuracy of intent-from-q      float 9e-6, 2e-4; double 3e-14, 3e-13
//          accuracy of intent-calculated  float 6e-5, 2e-4; double 9e-14, 3e-13
// Source   "Neon016: QKVI Intent Attention", section 2; neon010 (from q) and neon052 (calculated),
//          section 4. Differs in the per-head grain and the bias, which are ours.
// Cost     one sigmoid per output number; from q: dim_qk dim_v multiplications a row, calculated
//          (2 dim_qk + dim_v) dim_v, backward twice that.

#include <heed/ops/intent_gate/lanes.hpp>
#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

// I is the op's extra input "intent".
template <class Real>
struct IntentGate : detail::GateReadout<Real> {
  static constexpr bool uses_extra = true;
  using PlaceFree = IntentGate;

  [[nodiscard]] static const char* extra_name() { return "intent"; }
  [[nodiscard]] Index extra_dim(const Geometry& g) const { return this->gate_dim(g); }
  static constexpr auto parameters = std::tuple{named_if_given("gate.bias", &IntentGate::bias),
                                                option("grain", &IntentGate::grain)};

  void forward(const ReadoutPanel<Real>& panel) const {
    this->lane_gate(panel.head).forward(panel, panel.extra);
  }
  void vjp(const ReadoutPanel<Real>& panel, IntentGate& grad) const {
    grad.add_bias_gradient(panel.head,
                           this->lane_gate(panel.head).vjp(panel, panel.extra, panel.dextra));
  }
  template <class S>
  void reference(ReadoutContext<S>& context) const {
    const Index width = this->gate_dim(context.geometry);
    this->gate_rows(context, [&](Index b, Index h, Index i, Index c) {
      return context.extra_row(b, h, i, width)[c];
    });
  }
};

// I = q Wg
template <class Real>
struct IntentFromQuery : detail::WeightedGate<Real> {
  static constexpr bool uses_query = true;

  Param<Real> weight;  // Wg (heads, dim_qk, dim_v or 1)

  static constexpr auto parameters =
      std::tuple{tensor("gate.weight", &IntentFromQuery::weight, &IntentFromQuery::row_shape),
                 named_if_given("gate.bias", &IntentFromQuery::bias),
                 option("grain", &IntentFromQuery::grain)};

  void forward(const ReadoutPanel<Real>& panel) const {
    this->lane_gate(panel.head).forward(panel, logits(panel).constant());
  }
  void vjp(const ReadoutPanel<Real>& panel, IntentFromQuery& grad) const {
    const TurnedGradient<Real> dlogits = this->gate_vjp(panel, logits(panel), grad);
    LinearMap<Real>(weight, panel).vjp(panel.query, dlogits, panel.dquery, grad.weight);
  }
  template <class S>
  void reference(ReadoutContext<S>& context) const {
    this->gate_rows(context, [&](Index b, Index h, Index i, Index c) {
      return map_column(context.query_row(b, h, i), weight, h, c);
    });
  }

 private:
  // I of the panel, in panel.work.
  [[nodiscard]] LaneTile<Real> logits(const ReadoutPanel<Real>& panel) const {
    return LinearMap<Real>(weight, panel).product(panel.query);
  }
};

// I = q Wq + k Wk + v Wv, k and v of the query's own token
template <class Real>
struct IntentCalculated : detail::WeightedGate<Real> {
  static constexpr bool uses_query = true, uses_own_rows = true;

  Param<Real> query_weight, key_weight;  // Wq, Wk (heads, dim_qk, dim_v or 1)
  Param<Real> value_weight;              // Wv (heads, dim_v, dim_v or 1)

  static constexpr auto parameters = std::tuple{
      tensor("gate.query_weight", &IntentCalculated::query_weight, &IntentCalculated::row_shape),
      tensor("gate.key_weight", &IntentCalculated::key_weight, &IntentCalculated::row_shape),
      tensor("gate.value_weight", &IntentCalculated::value_weight, &IntentCalculated::value_shape),
      named_if_given("gate.bias", &IntentCalculated::bias),
      option("grain", &IntentCalculated::grain)};

  void forward(const ReadoutPanel<Real>& panel) const {
    this->lane_gate(panel.head).forward(panel, logits(panel).constant());
  }
  void vjp(const ReadoutPanel<Real>& panel, IntentCalculated& grad) const {
    const TurnedGradient<Real> dlogits = this->gate_vjp(panel, logits(panel), grad);
    const Maps maps(*this, panel);
    maps.query.vjp(panel.query, dlogits, panel.dquery, grad.query_weight);
    maps.key.vjp(panel.own_key, dlogits, panel.down_key, grad.key_weight);
    maps.value.vjp(panel.own_value, dlogits, panel.down_value, grad.value_weight);
  }
  template <class S>
  void reference(ReadoutContext<S>& context) const {
    this->gate_rows(context, [&](Index b, Index h, Index i, Index c) {
      return S(map_column(context.query_row(b, h, i), query_weight, h, c) +
               map_column(context.own_key_row(b, h, i), key_weight, h, c) +
               map_column(context.own_value_row(b, h, i), value_weight, h, c));
    });
  }

 private:
  struct Maps {
    LinearMap<Real> query, key, value;
    Maps(const IntentCalculated& of, const ReadoutPanel<Real>& panel)
        : query(of.query_weight, panel), key(of.key_weight, panel), value(of.value_weight, panel) {}
  };
  // I of the panel, in panel.work.
  [[nodiscard]] LaneTile<Real> logits(const ReadoutPanel<Real>& panel) const {
    const Maps maps(*this, panel);
    const LaneTile<Real> intent = maps.query.product(panel.query);
    maps.key.apply(panel.own_key, intent, Store::add);
    maps.value.apply(panel.own_value, intent, Store::add);
    return intent;
  }
};

template <class Real>
using IntentGated = Attention<Real, DotScore<Real>, Softmax<Real>, IntentGate<Real>>;
template <class Real>
using IntentFromQ = Attention<Real, DotScore<Real>, Softmax<Real>, IntentFromQuery<Real>>;
template <class Real>
using IntentCalc = Attention<Real, DotScore<Real>, Softmax<Real>, IntentCalculated<Real>>;

// The op for `g`, with weights of 0: every gate is half open.
template <class Real>
[[nodiscard]] IntentFromQ<Real> make_intent_from_q(const Geometry& g,
                                                   GateGrain grain = GateGrain::elementwise) {
  IntentFromQ<Real> op;
  op.readout.grain = grain;
  op.readout.weight = Param<Real>(std::vector<Index>{g.heads, g.dim_qk, op.readout.gate_dim(g)});
  return op;
}
template <class Real>
[[nodiscard]] IntentCalc<Real> make_intent_calculated(const Geometry& g,
                                                      GateGrain grain = GateGrain::elementwise) {
  IntentCalc<Real> op;
  op.readout.grain = grain;
  const Index columns = op.readout.gate_dim(g);
  op.readout.query_weight = Param<Real>(std::vector<Index>{g.heads, g.dim_qk, columns});
  op.readout.key_weight = op.readout.query_weight;
  op.readout.value_weight = Param<Real>(std::vector<Index>{g.heads, g.dim_v, columns});
  return op;
}

}  // namespace HEED_ABI
}  // namespace heed
