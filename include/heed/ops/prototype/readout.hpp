// SPDX-License-Identifier: Apache-2.0
#pragma once

// The readout of prototype attention (formulas and symbols: ops/prototype.hpp):
//
//   out_i = mixed_i + mu (W_w - q_i),   w = argmax_m u(q_i) . u(W_m)
//     dmixed = dout,   dq_i -= mu dout_i,   dW_w += mu dout_i,   dmu = sum_i dout_i . (W_w - q_i)
//     delta = rowsum(dout o mixed)
//
// PrototypeReadout has prototypes of its own and goes with any score. TiedPrototypeReadout works on
// those of the score beside it.
//
// Reports  winner: w of the row, -1 where the head has no prototypes.
// Accuracy the pull within 3 eps |mu| (|W_w| + |q_i|), before it is added. Mixed rows are saved for
//          delta: out - mu (W_w - q_i) would lose them beside a strong pull.

#include <heed/ops/prototype/memory.hpp>
#include <heed/plug/readout.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/panel_gemm.hpp>

#include <array>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// The pull of one head towards its prototypes.
template <class Real>
struct PrototypePull {
  using P = Pack<Real>;
  const PrototypeMemory<Real>& memory;
  const Param<Real>& pull;  // mu

  void forward(const ReadoutPanel<Real>& panel) const {
    if (memory.count(panel.head) == 0) return panel.diagnostics.fill(Real(-1));
    const Winners winner = winners(panel);
    const Index lanes = panel.vectors * kLanes<Real>, dim = panel.tile.rows;
    const Real* W = memory.prototype(panel.head, 0);
    const Real mu = pull.head(panel.head);
    for (Index c = 0; c < dim; ++c) {  // out = mixed + mu (W_w - q)
      Real* out = panel.tile.row(c);
      const Real* q = panel.query.row(c);
      for (Index i = 0; i < lanes; ++i) out[i] += mu * (W[winner[std::size_t(i)] * dim + c] - q[i]);
    }
    for (Index i = 0; i < lanes; ++i) panel.diagnostics.row(0)[i] = Real(winner[std::size_t(i)]);
  }

  // Adds to `dmemory` and `dpull`; the tile holds dout, which equals dmixed.
  void vjp(const ReadoutPanel<Real>& panel, PrototypeMemory<Real>& dmemory,
           Param<Real>& dpull) const {
    lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);
    if (memory.count(panel.head) == 0) return;
    const Winners winner = winners(panel);
    const Index dim = panel.tile.rows;
    const Real* W = memory.prototype(panel.head, 0);
    Real* dW = dmemory.prototype(panel.head, 0);
    const Real mu = pull.head(panel.head);
    for (Index c = 0; c < dim; ++c)  // dq -= mu dout
      for (int v = 0; v < panel.vectors; ++v) panel.dquery.add(c, v, panel.tile.load(c, v) * -mu);
    double sum = 0.0;
    for (Index i = 0; i < panel.valid_lanes; ++i) {
      const Index row = winner[std::size_t(i)] * dim;
      Real along = Real(0);  // dmu = dout . (W_w - q),  dW_w += mu dout
      for (Index c = 0; c < dim; ++c) {
        const Real dout = panel.tile.row(c)[i];
        along += dout * (W[row + c] - panel.query.row(c)[i]);
        dW[row + c] += mu * dout;
      }
      sum += double(along);
    }
    dpull.head(panel.head) += Real(sum);
  }

  template <class S>
  void reference(ReadoutContext<S>& context) const {
    const Geometry g = context.geometry;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      const S* q = context.query_row(b, h, i);
      const Index w = winner_of(q, h);
      context.diagnostics[0][std::size_t(g.row_index(b, h, i))] = double(w);
      if (w < 0) return;
      S* out = context.out_row(b, h, i);
      for (Index c = 0; c < g.dim_v; ++c)
        out[c] = out[c] + pull.head(h) * (memory.prototype(h, w)[c] - q[c]);
    });
  }

 private:
  using Winners = std::array<Index, std::size_t(kPanelVectors) * 16>;

  // Winner of each lane. Ties and NaN keep the lower index.
  [[nodiscard]] Winners winners(const ReadoutPanel<Real>& panel) const {
    const Index h = panel.head, count = memory.count(h), dim = panel.query.rows;
    const LaneTile<Real> match = panel.work.part(0, count);
    panel_gemm(Store::overwrite, count, dim, panel.vectors,
               Broadcast<Real>{memory.prototype(h, 0), dim, 1}, panel.query.data, panel.query.lanes,
               match.data, match.lanes);
    std::array<P, std::size_t(kPanelVectors)> best, index;
    for (Index m = 0; m < count; ++m) {
      const P factor = Real(1) / (norm(memory.prototype(h, m), dim) + Real(memory.eps));
      for (std::size_t v = 0; v < std::size_t(panel.vectors); ++v) {
        const P cosine = match.load(m, int(v)) * factor;
        if (m == 0) best[v] = cosine, index[v] = Real(0);
        const auto better = cosine > best[v];
        best[v] = select(better, cosine, best[v]);
        index[v] = select(better, P(Real(m)), index[v]);
      }
    }
    Winners winner{};
    for (int i = 0; i < panel.vectors * kLanes<Real>; ++i)
      winner[std::size_t(i)] = Index(index[std::size_t(i / kLanes<Real>)].lane(i % kLanes<Real>));
    return winner;
  }

  // |w| from packs of squares if these cannot overflow; a winner needs no better norm.
  [[nodiscard]] static Real norm(const Real* w, Index dim) {
    constexpr Index W = kLanes<Real>;
    P squares = Real(0);
    Index c = 0;
    for (; c + W <= dim; c += W) squares = mul_add(P::load(w + c), P::load(w + c), squares);
    Real sum = sum_lanes(squares);
    for (; c < dim; ++c) sum += w[c] * w[c];
    if (sum > Real(1e-20) && sum < Real(1e30)) return std::sqrt(sum);
    return row_norm<Real>(dim, [=](Index x) { return w[x]; });
  }

  // Reference.
  template <class S>
  [[nodiscard]] Index winner_of(const S* q, Index h) const {
    Index winner = -1;
    auto best = math::value_of(math::constant<S>(0));
    for (Index m = 0; m < memory.count(h); ++m) {
      const Real* w = memory.prototype(h, m);
      const S dot = math::dot_product(
          memory.W.extent(2), [=](Index c) { return q[c]; }, [=](Index c) { return w[c]; });
      const S norm = memory.norm(h, m) + math::constant<S>(memory.eps);
      const auto cosine = math::value_of(S(dot / norm));
      if (winner >= 0 && !(cosine > best)) continue;
      winner = m;
      best = cosine;
    }
    return winner;
  }
};

struct PlainPrototypeReadout : PlainReadout {
  static constexpr bool saves_mixed = true, uses_query = true;
  static constexpr int diagnostics = 1;
  [[nodiscard]] static const char* diagnostic_name(int) { return "winner"; }
  [[nodiscard]] static bool diagnostic_is_index(int) { return true; }
};

template <class Real>
void check_pull(const PrototypeMemory<Real>& memory, const Geometry& g, const char* where) {
  require(!memory.W.given() || g.dim_v == g.dim_qk, where, ": value has dim_v ", g.dim_v,
          ", the prototypes pull it within dim_qk ", g.dim_qk, "; both must be equal");
}

}  // namespace detail

template <class Real>
struct PrototypeReadout : detail::PlainPrototypeReadout, PrototypeMemory<Real> {
  Param<Real> pull = Real(0.1);  // mu
  static constexpr auto parameters = std::tuple{
      tensor_if_given("W", &PrototypeReadout::W, &PrototypeReadout::memory_shape),
      named("pull", &PrototypeReadout::pull), option("counts", &PrototypeReadout::counts),
      option("eps", &PrototypeReadout::eps)};

  void check(const Geometry& g, const char* where) const {
    this->check_memory(g, where);
    detail::check_pull(*this, g, where);
  }
  [[nodiscard]] Index work_rows(const Geometry&, bool) const { return this->rows(); }

  void forward(const ReadoutPanel<Real>& panel) const { lanes().forward(panel); }
  void vjp(const ReadoutPanel<Real>& panel, PrototypeReadout& grad) const {
    lanes().vjp(panel, grad, grad.pull);
  }
  template <class S>
  void reference(ReadoutContext<S>& context) const {
    lanes().reference(context);
  }

 private:
  [[nodiscard]] detail::PrototypePull<Real> lanes() const { return {*this, pull}; }
};

// Works on the prototypes of the score beside it, which must have some (PrototypeMemory).
template <class Real>
struct TiedPrototypeReadout : detail::PlainPrototypeReadout {
  static constexpr bool uses_score = true;
  using Memory = PrototypeMemory<Real>;

  Param<Real> pull = Real(0.1);  // mu
  static constexpr auto parameters = std::tuple{named("pull", &TiedPrototypeReadout::pull)};

  void check(const Geometry& g, const char* where, const Memory& score) const {
    detail::check_pull(score, g, where);
  }
  [[nodiscard]] Index work_rows(const Geometry&, bool, const Memory& score) const {
    return score.rows();
  }
  void forward(const ReadoutPanel<Real>& panel, const Memory& score) const {
    lanes(score).forward(panel);
  }
  void vjp(const ReadoutPanel<Real>& panel, TiedPrototypeReadout& grad, const Memory& score,
           Memory& grad_score) const {
    lanes(score).vjp(panel, grad_score, grad.pull);
  }
  template <class S>
  void reference(ReadoutContext<S>& context, const Memory& score) const {
    lanes(score).reference(context);
  }

 private:
  [[nodiscard]] detail::PrototypePull<Real> lanes(const Memory& score) const {
    return {score, pull};
  }
};

}  // namespace HEED_ABI
}  // namespace heed
