// SPDX-License-Identifier: Apache-2.0
#pragma once

// Differential attention: every head has two attention maps, and the second is subtracted from the first. The part that
// both share counts as noise and cancels, so that the weights of the keys that matter stand out.
//
//   P1 = softmax(S1),  S1 = s q1.k1        dS1 = P1 o (X - r1)              r1 = rowsum(P1 o X)
//   P2 = softmax(S2),  S2 = s q2.k2        dS2 = -lambda P2 o (X - r2)      r2 = rowsum(P2 o X)
//   W = P1 - lambda P2                     dlambda = -sum_i r2_i            per token: dlambda_i = -r2_i
//   out = readout(W v)                     X = dL/dW
//   lse1, lse2 of S1 and S2                where the loss reads them, dS1 += P1 dlse1 and dS2 += P2 dlse2
//
//   lambda of Differential     a parameter
//             DifferentialV1   exp(lq1.lk1) - exp(lq2.lk2) + lambda_init
//                              dlq1 = dlambda exp(lq1.lk1) lk1, dlq2 = -dlambda exp(lq2.lk2) lk2, lk1 and lk2 likewise
//             DifferentialV2   sigmoid(x_i), x the op's extra input      dx_i = dlambda_i lambda_i (1 - lambda_i)
//
// Options  the kind of lambda, and the heads or halves of heads that the two maps read: ops/differential/lambda.hpp. The
//          readout of V1, a norm of each head's row: ops/differential/head_norm.hpp.
// Symbols  s scale, default 1/sqrt(w); w width of one map
// Shapes   Differential and V1: query and key (.., 2w), the halves [q1|q2] and [k1|k2], value
//          (.., dim_v), in V1 usually 2w wide; V2: query (batch, 2 heads, len_q, w), extra (batch,
//          heads, len_q, 1)
// Bounds   rows of W sum to 1 - lambda and may hold negative weights; a row that sees no key has
//          weights and gradients 0 and lse -infinity; a hidden pair has weight and gradient 0
//          whatever dL/dW holds there; lambda = 0 gives the plain softmax of map 1, bit for bit the
//          same for any finite map 2; a visible NaN in either map makes its row NaN and no other
// Accuracy each weight within (8 + 1.2 D) eps (P1 + |lambda| P2), D the spread of the row's scores;
//          sums in blocks of 64 terms, so that long rows lose no digits
//          errors of out, gradients on hard inputs (README.md beside this file):
//          accuracy of differential     float 8e-5, 3e-4; double 2e-13, 5e-13
//          accuracy of differential-v1  float 6e-6, 4e-3; double 2e-14, 7e-12
//          accuracy of differential-v2  float 4e-6, 3e-4; double 1e-14, 3e-13
// Source   seed note 001; Ye et al., Differential Transformer (arXiv 2410.05258), eq. 1 to 3;
//          Differential Transformer V2. Differs in: the seed's listing ignores its mask, here it
//          applies to both maps
// Cost     two exponentials per pair; one product with the values for both maps

#include <heed/ops/differential/head_norm.hpp>
#include <heed/ops/differential/lambda.hpp>
#include <heed/ops/differential/maps.hpp>
#include <heed/plug/attention.hpp>

#include <array>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The weights W. Parameters and options are those of `Lambda`.
template <class Real, class Lambda>
struct Difference : Lambda {
  using PlaceFree = std::conditional_t<place_free<Lambda>, Difference, void>;
  using SumOfSoftmaxes = Difference;
  static constexpr bool differentiates_lse = true;
  using P = Pack<Real>;

  // The factor of a map in W: 1 and -lambda.
  [[nodiscard]] Real map_factor(Index head, int map, Real extra) const {
    return map == 0 ? Real(1) : -this->lambda_of(head, extra);
  }
  [[nodiscard]] Real map_factor_slope(int map, Real extra) const requires(Lambda::uses_extra) {
    return map == 0 ? Real(0) : -this->lambda_slope(extra);
  }
  void add_map_factor(Index head, int map, double dfactor, Difference& grad) const
      requires(!Lambda::uses_extra) {
    if (map == 1) this->chain_lambda(head, -dfactor, grad);
  }

  void forward(const RowBlock<Real>& block) const {
    const LaneTile<Real>&map1 = block.scores[0], &map2 = block.scores[1];
    P lambda_i = this->lambda_of(block.head, P(Real(0)));
    for (int v = 0; v < block.vectors; ++v) {
      lambda_i = lane_lambda(block, v, lambda_i);
      const P sum1 = detail::exponentiate_map(block, 0, v);
      const P sum2 = detail::exponentiate_map(block, 1, v);
      detail::store_map_lse(block, 0, v, sum1);
      detail::store_map_lse(block, 1, v, sum2);
      const P factor1 = inverse_or_zero(sum1), factor2 = -lambda_i * inverse_or_zero(sum2);
      for (Index j = 0; j < map1.rows; ++j) {
        const P e1 = map1.load(j, v), e2 = map2.load(j, v);
        // P1 = e1 / sum1; a hidden pair in a row of NaN stays 0
        const P p1 = zero_where(e1 == P(Real(0)), e1 * factor1);
        // W = P1 - lambda P2
        map1.store(j, v, select(e2 == P(Real(0)), p1, mul_add(e2, factor2, p1)));
      }
    }
  }

  void vjp(const RowBlock<Real>& block, Difference& grad) const {
    const LaneTile<Real>&map1 = block.dscores[0], &map2 = block.dscores[1];
    P lambda_i = this->lambda_of(block.head, P(Real(0)));
    double dlambda = 0.0;
    for (int v = 0; v < block.vectors; ++v) {
      lambda_i = lane_lambda(block, v, lambda_i);
      const auto [sum1, product1] = detail::exponentiate_map_with(block, 0, v);
      const auto [sum2, product2] = detail::exponentiate_map_with(block, 1, v);
      const P factor1 = inverse_or_zero(sum1), inverse2 = inverse_or_zero(sum2);
      const P factor2 = -lambda_i * inverse2;
      const P r1 = product1 * factor1, r2 = product2 * inverse2;
      const P dlse1 = lse_gradient(block, 0, v), dlse2 = lse_gradient(block, 1, v) * inverse2;
      for (Index j = 0; j < map1.rows; ++j) {
        const P x = block.dweights.load(j, v);
        const P e1 = map1.load(j, v), e2 = map2.load(j, v);
        const auto hidden1 = e1 < P(Real(0)), hidden2 = e2 < P(Real(0));
        const P p1 = zero_where(hidden1, e1 * factor1);
        const P minus_p2 = zero_where(hidden2, e2 * factor2);  // -lambda P2
        // dS1 = P1 o (X - r1 + dlse1),  dS2 = -lambda P2 o (X - r2) + P2 dlse2
        map1.store(j, v, zero_where(hidden1, p1 * (x - (r1 - dlse1))));
        map2.store(j, v, zero_where(hidden2, mul_add(e2, dlse2, minus_p2 * (x - r2))));
        // W once more
        block.weights.store(j, v, p1 + minus_p2);
      }
      // dlambda = -r2 of every row
      if constexpr (Lambda::uses_extra)
        store_dextra(block, v, sum2, -r2);
      else
        dlambda += sum_valid_lanes(-r2, v, block.valid_lanes);
    }
    if constexpr (!Lambda::uses_extra) this->chain_lambda(block.head, dlambda, grad);
  }

  // w. = P1. - lambda P2. - lambda. P2, with P. = P o (S. - r) and lse. = r = rowsum(P o S.) of each map.
  void jvp(const RowBlock<Real>& block, const RowTangents<Real>& tangents,
           const Difference& direction) const {
    const LaneTile<Real>&map1 = block.scores[0], &map2 = block.scores[1];
    const LaneTile<Real>&moved1 = tangents.scores[0], &moved2 = tangents.scores[1];
    const P zero = Real(0), head_tangent = head_lambda_tangent(block.head, direction);
    P lambda_i = this->lambda_of(block.head, zero);
    for (int v = 0; v < block.vectors; ++v) {
      lambda_i = lane_lambda(block, v, lambda_i);
      const P dlambda = lane_lambda_tangent(block, tangents, v, head_tangent);
      const P sum1 = detail::exponentiate_map(block, 0, v);
      const P sum2 = detail::exponentiate_map(block, 1, v);
      detail::store_map_lse(block, 0, v, sum1);
      detail::store_map_lse(block, 1, v, sum2);
      const P inverse1 = inverse_or_zero(sum1), inverse2 = inverse_or_zero(sum2);
      // A pair of weight 0 has tangent 0.
      const auto mean = [&](const LaneTile<Real>& map, const LaneTile<Real>& moved) {
        return fold_over_keys<Real, P, detail::kDifferenceBlock>(map.rows, [&](P& sum, Index j) {
          const P e = map.load(j, v);
          sum += zero_where(e == zero, e * moved.load(j, v));
        });
      };
      const P r1 = mean(map1, moved1) * inverse1, r2 = mean(map2, moved2) * inverse2;
      r1.store(tangents.lse[0] + v * kLanes<Real>);
      r2.store(tangents.lse[1] + v * kLanes<Real>);
      for (Index j = 0; j < map1.rows; ++j) {
        const P e1 = map1.load(j, v), e2 = map2.load(j, v);
        const P p1 = zero_where(e1 == zero, e1 * inverse1);
        const P p2 = zero_where(e2 == zero, e2 * inverse2);
        const P dp1 = zero_where(e1 == zero, p1 * (moved1.load(j, v) - r1));
        const P dp2 = zero_where(e2 == zero, p2 * (moved2.load(j, v) - r2));
        map1.store(j, v, p1 - lambda_i * p2);
        moved1.store(j, v, dp1 - lambda_i * dp2 - zero_where(e2 == zero, dlambda * p2));
      }
    }
  }

  // Reference: the weights of one row.
  template <class S>
  [[nodiscard]] std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights = long_hand_softmax(row.scores[0]);
    const std::vector<S> second = long_hand_softmax(row.scores[1]);
    const S lambda_i = this->lambda_of(row.head, row.extra);
    for (std::size_t j = 0; j < weights.size(); ++j) weights[j] = weights[j] - lambda_i * second[j];
    return weights;
  }

 private:
  [[nodiscard]] static P lse_gradient(const RowBlock<Real>& block, std::size_t map, int v) {
    return block.dlse[map] ? P::load(block.dlse[map] + v * kLanes<Real>) : P(Real(0));
  }
  // lambda of the lanes of vector v: one per lane, or that of the head.
  [[nodiscard]] P lane_lambda(const RowBlock<Real>& block, int v, P head_lambda) const {
    if constexpr (Lambda::uses_extra)
      return this->lambda_of(block.head, P::load(block.extra + v * kLanes<Real>));
    else
      return head_lambda;
  }
  // lambda. of the head by its parameters, and lambda. of the lanes of vector v.
  [[nodiscard]] P head_lambda_tangent(Index head, const Difference& direction) const {
    double sum = 0;
    if constexpr (!Lambda::uses_extra) {
      Difference slope = *this;
      visit_parameters(slope, [](const char*, auto& param) { param.set_zero(); });
      this->chain_lambda(head, 1, slope);
      std::vector<double> slopes;
      visit_parameters(slope, [&](const char*, const auto& param) {
        for (Index i = 0; i < param.size(); ++i) slopes.push_back(double(param[i]));
      });
      auto next = slopes.begin();
      visit_parameters(direction, [&](const char*, const auto& param) {
        for (Index i = 0; i < param.size(); ++i) sum += *next++ * double(param[i]);
      });
    }
    return P(Real(sum));
  }
  [[nodiscard]] P lane_lambda_tangent(const RowBlock<Real>& block,
                                      const RowTangents<Real>& tangents, int v,
                                      P head_tangent) const {
    if constexpr (Lambda::uses_extra) {
      const Index at = v * kLanes<Real>;
      return this->lambda_slope(P::load(block.extra + at)) * P::load(tangents.extra + at);
    } else {
      return head_tangent;
    }
  }
  // dextra = dlambda dlambda/dextra, 0 in a row that sees no key.
  void store_dextra(const RowBlock<Real>& block, int v, P sum, P dlambda) const {
    const Index at = v * kLanes<Real>;
    const P dextra = dlambda * this->lambda_slope(P::load(block.extra + at));
    zero_where(sum == P(Real(0)), dextra).store(block.dextra + at);
  }
};

// One learnable lambda, or one per head; the source form.
template <class Real>
using Differential =
    Attention<Real, DotScore<Real>, Difference<Real, GivenLambda<Real>>, Identity<Real>>;

// Microsoft's V1: lambda from four vectors, then a norm per head; see make_differential_v1.
template <class Real>
using DifferentialV1 =
    Attention<Real, DotScore<Real>, Difference<Real, ReparameterisedLambda<Real>>, HeadNorm<Real>>;

// V2: pairs of whole query heads, lambda per token from the op's extra input.
template <class Real>
using DifferentialV2 =
    Attention<Real, DotScore<Real>, Difference<Real, TokenLambda<Real>>, Identity<Real>>;

// V1 of the layer at `depth` (from 1) with maps of width w and values of width 2w: lambda_init and
// the norm's factor 1 - lambda_init are set together. `vectors` are lambda_q1, lambda_k1, lambda_q2
// and lambda_k2, zeros where empty; the norm's weight holds ones.
template <class Real>
[[nodiscard]] DifferentialV1<Real> make_differential_v1(
    Index width, Index depth, bool with_weight = true,
    const std::array<std::vector<Real>, 4>& vectors = {}) {
  require(width >= 1, "make_differential_v1: width is ", width, ", it must be at least 1");
  DifferentialV1<Real> op;
  op.normaliser.lambda_init = lambda_init_at(depth);
  op.readout.factor = 1.0 - op.normaliser.lambda_init;
  std::size_t next = 0;
  visit_parameters(op.normaliser, [&](const char* name, Param<Real>& param) {
    const std::vector<Real>& given = vectors[next++];
    require(given.empty() || Index(given.size()) == width, "make_differential_v1: ", name, " has ",
            given.size(), " values, it must have one per column of a map (", width, ")");
    param = given.empty() ? Param<Real>(std::vector<Index>{width}) : Param<Real>({width}, given);
  });
  if (with_weight)
    op.readout.weight =
        Param<Real>({2 * width}, std::vector<Real>(std::size_t(2 * width), Real(1)));
  return op;
}

}  // namespace HEED_ABI
}  // namespace heed
