// SPDX-License-Identifier: Apache-2.0
#pragma once

// Root-mean-square norm of each head's mixed row.
//
//   m = mean_c o_c^2,  i = 1 / sqrt(m + eps)
//   out_c = factor i o_c weight_c
//
// Backward (g = dL/dout, n = dim_v):
//   t = sum_c g_c weight_c o_c
//   do_c = factor (i g_c weight_c - i^3 t o_c / n)
//   dweight_c = factor sum_rows i g_c o_c
//   delta = sum_c do_c o_c = factor i^3 eps t     since 1 - m i^2 = eps i^2
//
// Shapes   weight (dim_v), shared by all heads, or empty for none
// Bounds   a row of zeros stays 0 and has the gradient factor weight g / sqrt(eps); |o| up to the
//          root of the largest finite number over n (1e18 in float); inf and NaN make NaN of their
//          own column at least
// Accuracy out within (n / 4 + 4) eps of |out|
// Source   Ye et al., Differential Transformer, eq. 3: eps 1e-5, factor 1 - lambda_init

#include <heed/core/scalar.hpp>
#include <heed/plug/readout.hpp>
#include <heed/simd/exp.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

struct HeadNormOptions {
  double factor = 1.0;
  double eps = 1e-5;
};

template <class Real>
struct HeadNorm : PlainReadout, HeadNormOptions {
  static constexpr bool saves_mixed = true;
  using PlaceFree = HeadNorm;
  using P = Pack<Real>;

  Param<Real> weight;  // (dim_v), or empty

  [[nodiscard]] std::vector<Index> weight_shape(const Geometry& g) const { return {g.dim_v}; }

  static constexpr auto parameters =
      std::tuple{tensor_if_given("weight", &HeadNorm::weight, &HeadNorm::weight_shape),
                 option("factor", &HeadNorm::factor), option("eps", &HeadNorm::eps)};

  void check(const Geometry&, const char* where) const {
    require(std::isfinite(eps) && math::value_of(Real(eps)) > 0, where, ": eps is ", eps,
            ", it must be finite and positive in the scalar at hand");
  }
  [[nodiscard]] Index work_rows(const Geometry&, bool backward) const { return backward ? 3 : 0; }

  void forward(const ReadoutPanel<Real>& panel) const {
    for (int v = 0; v < panel.vectors; ++v) {
      P squares = Real(0);
      for (Index c = 0; c < panel.tile.rows; ++c) {
        const P o = panel.tile.load(c, v);
        squares = mul_add(o, o, squares);
      }
      const P scale = inverse_rms(squares, panel.tile.rows) * Real(factor);
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, panel.tile.load(c, v) * scale * weight_at(c));
    }
  }

  void vjp(const ReadoutPanel<Real>& panel, HeadNorm& grad) const {
    for (int v = 0; v < panel.vectors; ++v) prepare_lanes(panel, v);
    for (Index c = 0; c < panel.tile.rows; ++c) {
      P dweight = Real(0);
      for (int v = 0; v < panel.vectors; ++v) {
        const P g = panel.tile.load(c, v), o = panel.saved.load(c, v);
        const P pull = panel.work.load(kPull, v) * o;
        dweight = mul_add(panel.work.load(kValidScale, v) * g, o, dweight);
        panel.tile.store(c, v, mul_add(panel.work.load(kScale, v) * weight_at(c), g, -pull));
      }
      if (weight.given()) grad.weight[c] += sum_lanes(dweight);
    }
  }

  template <class S>
  void reference(ReadoutContext<S>& context) const {
    const Geometry& g = context.geometry;
    for (Index row = 0; row < g.query_rows(); ++row) {
      S* o = context.out.data() + row * g.dim_v;
      S squares = math::constant<S>(0);
      for (Index c = 0; c < g.dim_v; ++c) squares += o[c] * o[c];
      const S mean = squares / math::constant<S>(double(g.dim_v));
      const S rms = math::sqrt(S(mean + math::constant<S>(eps)));
      for (Index c = 0; c < g.dim_v; ++c) {
        const S normed = math::constant<S>(factor) * o[c] / rms;
        o[c] = weight.given() ? S(normed * S(weight[c])) : normed;
      }
    }
  }

 private:
  // Rows of panel.work: factor i; factor i with 0 in padding lanes; factor i^3 t / n.
  static constexpr Index kScale = 0, kValidScale = 1, kPull = 2;

  [[nodiscard]] Real weight_at(Index c) const { return weight.given() ? weight[c] : Real(1); }

  [[nodiscard]] P inverse_rms(P squares, Index n) const {
    return Real(1) / math::sqrt(mul_add(squares, P(Real(1.0 / double(n))), P(Real(eps))));
  }

  void prepare_lanes(const ReadoutPanel<Real>& panel, int v) const {
    const Index n = panel.tile.rows, at = v * kLanes<Real>;
    P squares = Real(0), t = Real(0);
    for (Index c = 0; c < n; ++c) {
      const P o = panel.saved.load(c, v);
      squares = mul_add(o, o, squares);
      t = mul_add(panel.tile.load(c, v) * weight_at(c), o, t);
    }
    const P i = inverse_rms(squares, n), scale = i * Real(factor);
    const P cubic = scale * t * i * i;
    const auto valid = P::iota() + Real(at) < P(Real(panel.valid_lanes));
    panel.work.store(kScale, v, scale);
    panel.work.store(kValidScale, v, select(valid, scale, P(Real(0))));
    panel.work.store(kPull, v, cubic * Real(1.0 / double(n)));
    (cubic * Real(eps)).store(panel.delta + at);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
