// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention: the mixed values are read in two opposed ways, and the query moves step by step towards a
// synthesis of both readings, further where they disagree more. A row halts once its steps have become small.
//
//       m = sum_j softmax(scale q . k_j)_j v_j
//   (1) u+ = Vp m,  u- = Vn m
//         dm = Vp^T du+ + Vn^T du-      dVp = du+ m^T      dVn = du- m^T
//   (2) fixed = Su [u+|u-] + bs
//         d[u+|u-] = Su^T dfixed        dSu = dfixed [u+|u-]^T      dbs = dfixed
//   (3) tension = sigmoid(-cos),  cos = e+ . e-,  e = u / n,  n = max(|u|, 1e-6)
//         dcos = -dtension tension (1 - tension)
//         du+ += dcos (e- - cos e+) / n+      du- += dcos (e+ - cos e-) / n-      without cos e where |u| < 1e-6
//
//   from z_0 = q, at most max_steps times; dz = dL/dz_(t+1) in, dL/dz_t out:
//   (4) g = sigmoid(z_t . gate + bg)
//         dl = dg g (1 - g)      dz += dl gate      dgate += dl z_t      dbg += dl
//   (5) a = fixed + Sz z_t                                S = [Su|Sz]
//         dfixed += da           dz += Sz^T da      dSz += da z_t^T
//   (6) z_(t+1) = z_t + g tension silu(a)                 silu(a) = a s,  s = sigmoid(a)
//         da = dz g tension s (1 + a (1 - s))       dg = tension (dz . silu(a))      dtension += g (dz . silu(a))
//       the row halts when |z_(t+1) - z_t| < halt_eps (|z_t| + 1e-6); the step that halts it is still applied
//
//   out = z,  dq = dz
//
//   Halting::adaptive (adaptive computation time): learnt probabilities say after which step a row halts, and out is the
//   mean of z after each step, weighted by them. After step n, with the halting unit of the head:
//   (7) h_n = sigmoid(halt . z_n + bh)
//       N = the first n with h_1 + ... + h_n >= 1 - spare_eps, or max_steps
//       p_n = h_n for n < N,  p_N = R = 1 - (h_1 + ... + h_(N-1)),  rho = N + R
//         dR = dp_N + drho      dh_n = dp_n - dR  for n < N,  dh_N = 0
//         dl = dh h (1 - h)     dz_n += dl halt       dhalt += dl z_n       dbh += dl
//   (8) out = sum_n p_n z_n
//         dp_n = dout . z_n     dz_n += p_n dout
//   rho is the time that the row takes, which a loss may keep small: `steps` of forward(), drho `grad_steps` of backward().
//   rho has a slope; N, the number of steps taken, counts as a constant, and out and rho jump where N changes.
//
//   Halting::outside: every row takes max_steps steps, and z after each of them is a result, for a
//   loss that reads them all (PonderNet: nn/ponder_attention.hpp).
//   (9) steps = [z_1 | ... | z_(max_steps - 1)],  out = z_max_steps
//         dz_n += dsteps_n
//
// Halting decisions are constants. Formulas (1) to (3) do not depend on z: they are computed once.
//
// Symbols   q unscaled; d = dim_qk = dim_v. v_pos Vp, v_neg Vn (d, d); synth S (d, 3 d), synth_bias bs (d); gate g (1, d),
//           gate_bias bg (1): (out, in), shared by all heads. halt (heads, d), halt_bias bh (heads), of each head: only
//           Halting::adaptive reads and changes them. b_pos, b_neg: the source adds them to the logits of two softmax maps
//           P+ and P-, where they cancel. So P+ = P- = P and u+ = Vp (P v): one product with P. Kept for checkpoints;
//           gradient exactly 0.
// Reports   per row: updates, the steps applied, N of an adaptive row; steps_used, the number of those steps that were not
//           below halt_eps, for an adaptive row all of them; tension. With Halting::outside both are max_steps.
// Limits    bh = -infinity: N = max_steps, R = 1, out has the same bits as with halt_eps = 0. bh
//           large: as with max_steps = 1.
// Bounds    adaptive rows: spare_eps <= R <= 1 up to rounding and N <= rho <= N + 1; p sums to 1. tension in [sigmoid(-1),
//           sigmoid(1)]; 1/2 for a row that sees no key, whose m is 0 and which still recurses. No NaN where all products
//           of a row are finite, however long u or z are. per_token: no bit of a row depends on another row.
// Accuracy  double: 1e-12 of the largest entry, unless rounding decides whether a row halts.
//           errors of out, gradients on hard inputs (README.md beside this file):
//           accuracy of dialectical  float 4e-6, 2e-4; double 1e-14, 6e-13
// Ranges    useful: 2 to 4 steps, halt_eps 1e-4 ... 1e-2. Adaptive: up to 8 steps, bh = 1 in the
//           beginning (rows then take two steps), a cost of 1e-3 ... 1e-1 per step in the loss.
// Source    "Dialectical (Recursive Dual) Attention". (7), (8) and rho: Graves 2016, "Adaptive Computation Time for
//           Recurrent Neural Networks", equations 5 to 14, with one recursion per head. Differs in halting each row by itself; there,
//           halted rows move on and count steps until the whole batch has halted: Halting::batch.
// Cost      a row: (4 + steps) d^2 multiplications beside the 2 len_kv d of plain attention;
//           backward (12 + 3 steps) d^2. A panel of rows takes the steps of its slowest row.
//           Halting::batch rehearses first: the whole forward pass once more.

#include <heed/ops/dialectical/ponder.hpp>
#include <heed/ops/dialectical/reference.hpp>
#include <heed/plug/attention.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {

// Parameters, with their shapes: ops/dialectical/parts.hpp.
template <class Real>
struct DialecticalReadout : PlainReadout, DialecticalOptions, DialecticalParams<Real> {
  static constexpr bool saves_mixed = true, uses_query = true;
  static constexpr Interval kSpare{0, 1, "it must be in [0, 1)", true};
  static constexpr int diagnostics = 3;
  static constexpr bool rehearses = true, counts_steps = true;

  static constexpr auto parameters = std::tuple_cat(
      DialecticalParams<Real>::parameters,
      std::tuple{
          option("max_steps", &DialecticalReadout::max_steps, at_least(1, "it must be at least 1")),
          option("halt_eps", &DialecticalReadout::halt_eps,
                 at_least(0, "it must be finite and not negative")),
          option("halting", &DialecticalReadout::halting),
          option("spare_eps", &DialecticalReadout::spare_eps, kSpare)});

  [[nodiscard]] static const char* diagnostic_name(int i) {
    constexpr const char* names[] = {"steps_used", "updates", "tension"};
    return names[i];
  }

  void check(const Geometry& g, const char* where) const {
    require(g.dim_v == g.dim_qk, where, ": value has dim_v ", g.dim_v,
            ", it must equal dim_qk, which is ", g.dim_qk);
    const bool has_unit = this->halt.given() && this->halt_bias.given();
    require(!outside() || max_steps > 1, where, ": halting is outside, max_steps is ", max_steps,
            ", it must be at least 2");
    require(!adaptive() || has_unit || g.heads == 0, where, ": halting is adaptive, ",
            this->halt.given() ? "halt.bias" : "halt.weight",
            " was not given; make_dialectical() makes both for a geometry");
  }

  [[nodiscard]] const char* without_steps() const {
    return adaptive() || outside()
               ? nullptr
               : "the op's rows halt by the size of their steps; halting must be adaptive";
  }
  [[nodiscard]] Index step_columns(const Geometry& g) const {
    return outside() ? (max_steps - 1) * g.dim_v : 1;
  }
  [[nodiscard]] bool steps_are_time() const { return adaptive(); }

  // Halting::batch: a row goes on until all rows have halted. A rehearsal, in which each row halts
  // by itself, finds how many steps that takes.
  [[nodiscard]] bool needs_rehearsal() const {
    return halting == Halting::batch && max_steps > 1 && steps_of_all_ == 0;
  }
  [[nodiscard]] DialecticalReadout rehearsal() const {
    DialecticalReadout alone = *this;
    alone.halting = Halting::per_token;
    return alone;
  }
  template <class Reports>
  void settle(const Reports& reports) {
    steps_of_all_ = 1;
    for (const Real updates : reports.diagnostic("updates"))
      steps_of_all_ = std::max(steps_of_all_, int(updates));
  }

  [[nodiscard]] Index work_rows(const Geometry& g, bool backward) const {
    Index rows = DialecticalLanes<Real>::rows(g.dim_v);
    if (backward) rows += DialecticalTrace<Real>::rows(g.dim_v, max_steps);
    if (!adaptive()) return rows;
    rows += PonderLanes<Real>::rows();
    return rows + (backward ? PonderTrace<Real>::rows(g.dim_v, max_steps) : g.dim_v);
  }

  void forward(const ReadoutPanel<Real>& panel) const {
    RowPieces<Real> pieces(panel.work);
    const DialecticalLanes<Real> lanes(pieces, panel.tile.rows);
    // (1) to (3); then z_0 = q and (4) to (6) until the rows halt, with z in place of the mixed rows
    detail::dialectical_summaries(params(), panel.tile.constant(), panel.vectors, lanes);
    if (adaptive())
      ponder(panel, lanes, pieces);
    else
      recur(panel, lanes);
    const Real* reports[] = {lanes.steps_used, lanes.updates, lanes.tension};
    for (int i = 0; i < diagnostics; ++i)
      std::copy(reports[i], reports[i] + panel.tile.lanes, panel.diagnostics.row(i));
  }

  void vjp(const ReadoutPanel<Real>& panel, DialecticalReadout& grad) const {
    const Index d = panel.tile.rows;
    RowPieces<Real> pieces(panel.work);
    const DialecticalLanes<Real> lanes(pieces, d);
    const DialecticalTrace<Real> trace(pieces, d, max_steps);
    detail::DialecticalBackward<Real> pass{
        params(), lanes, trace, panel.vectors, {trace.natural, panel.valid_lanes}, grad};
    // Forward once more, every step kept
    detail::dialectical_summaries(params(), panel.saved, panel.vectors, lanes);
    const auto where = [&](Index t) {
      keep_moved(lanes, trace.moved.row(t));
      return Step{z_before(panel, trace, t), trace.argument.part(t * d, d), trace.z.part(t * d, d),
                  trace.gate.row(t)};
    };
    trace.dfixed.fill(Real(0));
    std::fill(trace.dtension, trace.dtension + panel.tile.lanes, Real(0));
    if (adaptive()) {
      const PonderLanes<Real> ponder(pieces);
      const PonderTrace<Real> kept(pieces, d, max_steps);
      detail::begin_pondering(ponder);
      const Index steps = run_steps(panel, lanes, where, [&](Index t, bool last) {
        detail::ponder_step<Real>(params(), *this, panel.head, lanes, ponder,
                                  trace.z.part(t * d, d).constant(), t + 1, last, panel.vectors);
        std::copy_n(ponder.weight.data, panel.tile.lanes, kept.weight.row(t));
      });
      kept.dz.fill(Real(0));
      std::fill(kept.dlast, kept.dlast + panel.tile.lanes, Real(0));
      // Invariant: behind step t, dz is dL/dz_t through everything that the rows did from z_t on
      for (Index t = steps - 1; t >= 0; --t) {
        // (8), (7)
        detail::ponder_step_vjp(pass, kept, panel.head, t, panel.tile.constant(),
                                panel.dsteps.data);
        // (6) to (4)
        detail::dialectical_step_vjp(pass, t, z_before(panel, trace, t), kept.dz);
      }
      add_to_query(panel, kept.dz);
    } else {
      const Index steps = run_steps(panel, lanes, where, kByStep);
      // (6) to (4), from the last step to the first; the tile holds dz
      for (Index t = steps - 1; t >= 0; --t) {
        // (9) dz_n += dsteps_n
        if (outside() && t + 1 < steps) add_rows(panel.dsteps.part(t * d, d), panel);
        detail::dialectical_step_vjp(pass, t, z_before(panel, trace, t), panel.tile);
      }
      add_to_query(panel, panel.tile);
    }
    // (3) to (1); the tile becomes dm
    detail::dialectical_summaries_vjp(pass, panel.saved, panel.tile);
    lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }

  template <class S>
  void reference(ReadoutContext<S>& context) const {
    detail::DialecticalLongHand<S>(params(), *this, context).run();
  }

 private:
  using Step = detail::DialecticalStep<Real>;

  [[nodiscard]] const DialecticalParams<Real>& params() const { return *this; }
  [[nodiscard]] bool adaptive() const { return halting == Halting::adaptive; }
  [[nodiscard]] bool outside() const { return halting == Halting::outside; }

  int steps_of_all_ = 0;  // for a settled readout: the steps that all rows take

  [[nodiscard]] int steps_to_run() const {
    return steps_of_all_ > 0 ? std::min(steps_of_all_, max_steps) : max_steps;
  }

  // True if a panel may stop as soon as its own rows have halted.
  [[nodiscard]] bool stops_alone() const { return halting != Halting::batch; }

  // (4) to (6) from z_0 = q until the rows halt, with z in place of the mixed rows; (9) under Halting::outside.
  void recur(const ReadoutPanel<Real>& panel, const DialecticalLanes<Real>& lanes) const {
    copy_query(panel, panel.tile);
    run_steps(
        panel, lanes,
        [&](Index) {
          return Step{panel.tile.constant(), lanes.step, panel.tile, lanes.gate};
        },
        [&](Index t, bool last) {
          if (!outside() || last) return;
          const LaneTile<Real>& z = panel.tile;
          std::copy_n(z.data, z.rows * z.lanes, panel.steps.part(t * z.rows, z.rows).data);
        });
  }
  // The same steps, with (7) after each; (8) replaces the mixed rows.
  void ponder(const ReadoutPanel<Real>& panel, const DialecticalLanes<Real>& lanes,
              RowPieces<Real>& pieces) const {
    const PonderLanes<Real> ponder(pieces);
    const LaneTile<Real> z = pieces.take(panel.tile.rows);
    copy_query(panel, z);
    panel.tile.fill(Real(0));
    detail::begin_pondering(ponder);
    run_steps(
        panel, lanes,
        [&](Index) {
          return Step{z.constant(), lanes.step, z, lanes.gate};
        },
        [&](Index t, bool last) {
          detail::ponder_step<Real>(params(), *this, panel.head, lanes, ponder, z.constant(), t + 1,
                                    last, panel.vectors);
          detail::add_pondered(ponder, z.constant(), panel.vectors, panel.tile);
        });
    std::copy_n(ponder.steps, z.lanes, panel.steps.data);
  }
  static void copy_query(const ReadoutPanel<Real>& panel, const LaneTile<Real>& to) {
    std::copy(panel.query.data, panel.query.data + to.rows * to.lanes, to.data);
  }
  static void add_rows(const LaneTile<const Real>& rows, const ReadoutPanel<Real>& panel) {
    for (Index c = 0; c < rows.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v) panel.tile.add(c, v, rows.load(c, v));
  }
  static void add_to_query(const ReadoutPanel<Real>& panel, const LaneTile<Real>& dz) {
    for (Index c = 0; c < dz.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v) panel.dquery.add(c, v, dz.load(c, v));
  }

  // The halt_after of run_steps() for rows that halt only by the size of their steps.
  static constexpr auto kByStep = [](Index, bool) {};

  // Begins a recursion and takes its steps until no row moves any more; returns how many. where(t) gives the memory that
  // step t reads and writes; halt_after(t, last), called behind it, may halt further rows.
  template <class Where, class Halt>
  Index run_steps(const ReadoutPanel<Real>& panel, const DialecticalLanes<Real>& lanes,
                  const Where& where, const Halt& halt_after) const {
    const Index limit = steps_to_run();
    detail::begin_recursion(lanes, panel.valid_lanes);
    for (Index t = 0; t < limit; ++t) {
      detail::dialectical_step<Real>(params(), *this, lanes, where(t), panel.vectors);
      halt_after(t, t + 1 == limit);
      if (stops_alone() && !detail::any_active(lanes, panel.vectors)) return t + 1;
    }
    return limit;
  }

  // Sets moved to 1 for the rows that the next step moves, to 0 for others.
  void keep_moved(const DialecticalLanes<Real>& lanes, Real* moved) const {
    const Index count = lanes.step.lanes;
    if (stops_alone())
      std::copy(lanes.active, lanes.active + count, moved);
    else
      std::fill(moved, moved + count, Real(1));
  }

  [[nodiscard]] static LaneTile<const Real> z_before(const ReadoutPanel<Real>& panel,
                                                     const DialecticalTrace<Real>& trace, Index t) {
    const Index d = panel.tile.rows;
    return t == 0 ? panel.query : trace.z.part((t - 1) * d, d).constant();
  }
};

template <class Real>
using Dialectical = Attention<Real, DotScore<Real>, Softmax<Real>, DialecticalReadout<Real>>;

// The op for `g`, with weights of 0: no row moves, out = q. An adaptive row halts with probability
// sigmoid(1) after each step.
template <class Real>
[[nodiscard]] Dialectical<Real> make_dialectical(const Geometry& g,
                                                 const DialecticalOptions& options = {}) {
  Dialectical<Real> op;
  static_cast<DialecticalOptions&>(op.readout) = options;
  static_cast<DialecticalParams<Real>&>(op.readout) = DialecticalParams<Real>::zeros(g.dim_qk);
  if (options.halting == Halting::adaptive) {
    op.readout.halt = Param<Real>(op.readout.head_rows(g));
    op.readout.halt_bias = Param<Real>(op.readout.per_head(g));
    std::fill_n(op.readout.halt_bias.data(), g.heads, Real(1));
  }
  return op;
}

}  // namespace HEED_ABI
}  // namespace heed
