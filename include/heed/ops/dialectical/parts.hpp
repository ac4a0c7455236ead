// SPDX-License-Identifier: Apache-2.0
#pragma once

// Options, parameters and scratch memory of dialectical attention (formulas: ops/dialectical.hpp).

#include <heed/plug/parameters.hpp>
#include <heed/plug/tile.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/transpose.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The moment at which a row stops moving. per_token: when its own step was small. batch: all rows together, once each row
// of the call has had a small step; this couples the sequences of a batch and, even under a causal mask, a token with later
// ones. adaptive: when its learnt halting probabilities are spent (7); this needs the parameters halt and halt_bias.
// outside: never; the caller gets z after every step, and decides (9).
enum class Halting { per_token, batch, adaptive, outside };

struct DialecticalOptions {
  int max_steps = 3;  // >= 1
  double halt_eps =
      1e-3;  // >= 0, of |step| / |z|; 0 never halts. Not read under Halting::adaptive and outside
  Halting halting = Halting::per_token;
  double spare_eps = 0.01;  // in [0, 1): an adaptive row halts once 1 - spare_eps is used up

  // |step| / |z| below which a step is the last one.
  [[nodiscard]] double small_step() const {
    return halting == Halting::adaptive || halting == Halting::outside ? 0 : halt_eps;
  }
};

// Shared by all heads but for the halting unit; matrices are (out, in). d = head width.
template <class Real>
struct DialecticalParams {
  Param<Real> v_pos, v_neg;       // (d, d)
  Param<Real> synth, synth_bias;  // (d, 3 d) over [u+ | u- | z], (d)
  Param<Real> gate, gate_bias;    // (1, d), (1)
  Param<Real> b_pos = Real(0),
              b_neg = Real(0);  // (1): they shift a softmax, without effect; gradient 0
  Param<Real> halt, halt_bias;  // (heads, d), (heads): for Halting::adaptive only

  // Shapes of the parameters.
  [[nodiscard]] std::vector<Index> square(const Geometry& g) const { return {g.dim_qk, g.dim_qk}; }
  [[nodiscard]] std::vector<Index> synthesis(const Geometry& g) const {
    return {g.dim_qk, 3 * g.dim_qk};
  }
  [[nodiscard]] std::vector<Index> row(const Geometry& g) const { return {g.dim_qk}; }
  [[nodiscard]] std::vector<Index> gate_row(const Geometry& g) const { return {1, g.dim_qk}; }
  [[nodiscard]] std::vector<Index> one(const Geometry&) const { return {1}; }
  [[nodiscard]] std::vector<Index> head_rows(const Geometry& g) const {
    return {g.heads, g.dim_qk};
  }
  [[nodiscard]] std::vector<Index> per_head(const Geometry& g) const { return {g.heads}; }

  static constexpr auto parameters = std::tuple{
      tensor("v_pos.weight", &DialecticalParams::v_pos, &DialecticalParams::square),
      tensor("v_neg.weight", &DialecticalParams::v_neg, &DialecticalParams::square),
      tensor("synth.weight", &DialecticalParams::synth, &DialecticalParams::synthesis),
      tensor("synth.bias", &DialecticalParams::synth_bias, &DialecticalParams::row),
      tensor("gate.weight", &DialecticalParams::gate, &DialecticalParams::gate_row),
      tensor("gate.bias", &DialecticalParams::gate_bias, &DialecticalParams::one),
      tensor("b_pos", &DialecticalParams::b_pos, &DialecticalParams::one),
      tensor("b_neg", &DialecticalParams::b_neg, &DialecticalParams::one),
      tensor_if_given("halt.weight", &DialecticalParams::halt, &DialecticalParams::head_rows),
      tensor_if_given("halt.bias", &DialecticalParams::halt_bias, &DialecticalParams::per_head)};

  // Zeros of the shapes for head width `dim`, without a halting unit.
  [[nodiscard]] static DialecticalParams zeros(Index dim) {
    DialecticalParams p;
    Geometry g;
    g.dim_qk = dim;
    for_each_entry<DialecticalParams>([&](const auto& entry) {
      if (!entry.may_be_empty) p.*entry.member = Param<Real>((p.*entry.rule)(g));
    });
    return p;
  }
};

// Hands out the rows of a work tile, one piece after the other.
template <class Real>
class RowPieces {
 public:
  explicit RowPieces(const LaneTile<Real>& work) : work_(work) {}
  [[nodiscard]] LaneTile<Real> take(Index rows) {
    const LaneTile<Real> piece = work_.part(next_, rows);
    next_ += rows;
    return piece;
  }
  [[nodiscard]] Real* take_row() { return take(1).data; }

 private:
  LaneTile<Real> work_;
  Index next_ = 0;
};

// Memory for every pass over a panel.
template <class Real>
struct DialecticalLanes {
  LaneTile<Real> summary;  // [2 d]: u+ over u-
  LaneTile<Real> fixed;    // [d]: the part of the synthesis that does not depend on z
  LaneTile<Real> step;     // [d]
  Real *tension, *gate;
  Real* active;  // 1 for rows that have not halted, 0 for others and for padding
  Real *steps_used, *updates;

  [[nodiscard]] static Index rows(Index dim) { return 4 * dim + 5; }
  DialecticalLanes(RowPieces<Real>& pieces, Index dim)
      : summary(pieces.take(2 * dim)),
        fixed(pieces.take(dim)),
        step(pieces.take(dim)),
        tension(pieces.take_row()),
        gate(pieces.take_row()),
        active(pieces.take_row()),
        steps_used(pieces.take_row()),
        updates(pieces.take_row()) {}

  [[nodiscard]] LaneTile<Real> positive() const { return summary.part(0, step.rows); }
  [[nodiscard]] LaneTile<Real> negative() const { return summary.part(step.rows, step.rows); }
};

// Further memory for Halting::adaptive.
template <class Real>
struct PonderLanes {
  LaneTile<Real> weight;  // [1]: the logit of h, then p, of the current step
  Real *spent, *steps;    // sum of h of the steps so far; rho
  Real* moved;            // 1 for the rows that the current step has moved

  [[nodiscard]] static Index rows() { return 4; }
  explicit PonderLanes(RowPieces<Real>& pieces)
      : weight(pieces.take(1)),
        spent(pieces.take_row()),
        steps(pieces.take_row()),
        moved(pieces.take_row()) {}
};

// Backward of Halting::adaptive: numbers kept from each step, and working memory.
template <class Real>
struct PonderTrace {
  LaneTile<Real> weight;  // [max_steps]: p
  LaneTile<Real> dz;      // [d]
  LaneTile<Real> dlogit;  // [1]: of h, one step
  Real* dlast;            // dL/dR of a row, set at its last step

  [[nodiscard]] static Index rows(Index dim, Index steps) { return steps + dim + 2; }
  PonderTrace(RowPieces<Real>& pieces, Index dim, Index steps)
      : weight(pieces.take(steps)),
        dz(pieces.take(dim)),
        dlogit(pieces.take(1)),
        dlast(pieces.take_row()) {}
};

// Backward: numbers kept from each step t, and working memory.
template <class Real>
struct DialecticalTrace {
  LaneTile<Real> z;         // [max_steps * d]: z after step t
  LaneTile<Real> argument;  // [max_steps * d]: a of step t
  LaneTile<Real> gate;      // [max_steps]
  LaneTile<Real> moved;     // [max_steps]: 1 where step t was applied
  LaneTile<Real> dfixed;    // [d]: sum over steps of da
  Real *dtension, *dlogit;  // dlogit: of the gate's sigmoid, one step
  LaneTile<Real> natural;   // memory for one [lanes][d] copy, rows padded to whole vectors

  [[nodiscard]] static Index rows(Index dim, Index steps) {
    return 2 * steps * (dim + 1) + dim + 2 + whole_vectors<Real>(dim);
  }
  DialecticalTrace(RowPieces<Real>& pieces, Index dim, Index steps)
      : z(pieces.take(steps * dim)),
        argument(pieces.take(steps * dim)),
        gate(pieces.take(steps)),
        moved(pieces.take(steps)),
        dfixed(pieces.take(dim)),
        dtension(pieces.take_row()),
        dlogit(pieces.take_row()),
        natural(pieces.take(whole_vectors<Real>(dim))) {}

  // The memory of z and argument, used again once their steps are done: [2 d].
  [[nodiscard]] LaneTile<Real> dsummary(Index dim) const { return {z.data, 2 * dim, z.lanes}; }
};

namespace detail {

// Adds products of lanes, summed over the valid lanes of a panel, to the gradients of weight matrices.
template <class Real>
class WeightGradients {
 public:
  WeightGradients(const LaneTile<Real>& natural, Index valid_lanes)
      : natural_(natural.data), row_(natural.rows), valid_lanes_(valid_lanes) {}

  // Sets the right factor of the following products, [d][lanes].
  void take_input(const LaneTile<const Real>& x) {
    dim_ = x.rows;
    unpack_lanes(x.data, x.lanes, valid_lanes_, x.rows, natural_, row_);
  }
  // to[r][c] += sum over lanes of dout[r] x[c]
  void add(const LaneTile<Real>& dout, Real* to, Index to_row) const {
    gemm_add(dout.rows, valid_lanes_, dim_, Broadcast<Real>{dout.data, dout.lanes, 1}, natural_,
             row_, to, to_row);
  }
  [[nodiscard]] Real sum(const Real* lanes) const {
    return Real(sum_valid_lanes(lanes, valid_lanes_));
  }

 private:
  Real* natural_;
  Index row_, dim_ = 0, valid_lanes_;
};

// Arguments that the backward functions of one panel share.
template <class Real>
struct DialecticalBackward {
  const DialecticalParams<Real>& w;
  const DialecticalLanes<Real>& lanes;
  const DialecticalTrace<Real>& trace;
  int vectors;
  WeightGradients<Real> sums;
  DialecticalParams<Real>& grad;
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
