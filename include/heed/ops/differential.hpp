// SPDX-License-Identifier: Apache-2.0
#pragma once

// Differential attention: what two attention maps have in common is noise, and is subtracted.
//
//   P1 = softmax(S1),  P2 = softmax(S2)          S1 = s q1.k1,  S2 = s q2.k2
//   W = P1 - lambda P2                           out = readout(W v)
//
// Backward (X = dL/dW):
//   r1 = rowsum(P1 o X),  r2 = rowsum(P2 o X)
//   dS1 = P1 o (X - r1)
//   dS2 = -lambda P2 o (X - r2)
//   dlambda = -sum_i r2_i                        per token: dlambda_i = -r2_i
//
// Symbols  s scale, default 1/sqrt(w); w width of one map; lambda: ops/differential/lambda.hpp
// Shapes   Differential and V1: query and key (.., 2w), the halves [q1|q2] and [k1|k2], value
//          (.., dim_v), in V1 usually 2w wide; V2: query (batch, 2 heads, len_q, w), extra (batch,
//          heads, len_q, 1)
// Bounds   rows of W sum to 1 - lambda and may hold negative weights; a row that sees no key has
//          weights and gradients 0 and lse -infinity; a hidden pair has weight and gradient 0
//          whatever dL/dW holds there; lambda = 0 gives the plain softmax of map 1, bit for bit the
//          same for any finite map 2; a visible NaN in either map makes its row NaN and no other
// Accuracy each weight within (8 + 1.2 D) eps (P1 + |lambda| P2), D the spread of the row's scores;
//          sums in blocks of 64 terms, so that long rows lose no digits
// Source   seed note 001; Ye et al., Differential Transformer (arXiv 2410.05258), eq. 1 to 3;
//          Differential Transformer V2. differs in: the seed's listing ignores its mask, here it
//          applies to both maps
// Cost     two exponentials per pair; one product with the values for both maps

#include <heed/ops/differential/head_norm.hpp>
#include <heed/ops/differential/lambda.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/normaliser.hpp>
#include <heed/plug/softmax.hpp>
#include <heed/simd/exp.hpp>

#include <algorithm>
#include <array>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real, class Lambda>
struct Difference : Lambda {
  using PlaceFree = std::conditional_t<place_free<Lambda>, Difference, void>;
  using P = Pack<Real>;

  void check(const Geometry& g, const char* where) const {
    require(this->pairs_whole_heads() || g.dim_qk % 2 == 0, where, ": dim_qk is ", g.dim_qk,
            ", it must be even: both maps read half a head");
    this->check_lambda(where);
  }

  void forward(const RowBlock<Real>& block) const {
    const auto& [scores1, scores2] = block.scores;
    P factor = this->lambda_of(block.head, P(Real(0)));  // lambda
    for (int v = 0; v < block.vectors; ++v) {
      factor = lane_lambda(block, v, factor);
      const P sum1 = exponentiate(scores1, block.score_max[0], v);
      const P sum2 = exponentiate(scores2, block.score_max[1], v);
      store_lse(block, 0, v, sum1);
      store_lse(block, 1, v, sum2);
      const P inverse1 = inverse(sum1), factor2 = -factor * inverse(sum2);
      for (Index j = 0; j < scores1.rows; ++j) {
        const P e1 = scores1.load(j, v), e2 = scores2.load(j, v);
        const P p1 =
            unless(e1 == P(Real(0)), e1 * inverse1);  // a hidden pair in a row of NaN stays 0
        scores1.store(j, v, select(e2 == P(Real(0)), p1, mul_add(e2, factor2, p1)));
      }
    }
  }

  void vjp(const RowBlock<Real>& block, Difference& grad) const {
    const auto& [dscores1, dscores2] = block.dscores;
    P factor = this->lambda_of(block.head, P(Real(0)));
    double dlambda = 0.0;
    for (int v = 0; v < block.vectors; ++v) {
      factor = lane_lambda(block, v, factor);
      const RowSums map1 = exponentiate_with(block, 0, v), map2 = exponentiate_with(block, 1, v);
      const P inverse1 = inverse(map1.sum), inverse2 = inverse(map2.sum);
      const P factor2 = -factor * inverse2;
      const P r1 = map1.product * inverse1, r2 = map2.product * inverse2;
      for (Index j = 0; j < dscores1.rows; ++j) {
        const P x = block.dweights.load(j, v);
        const P e1 = dscores1.load(j, v), e2 = dscores2.load(j, v);
        const auto hidden1 = e1 < P(Real(0)), hidden2 = e2 < P(Real(0));
        const P p1 = unless(hidden1, e1 * inverse1), p2 = unless(hidden2, e2 * factor2);
        dscores1.store(j, v, unless(hidden1, p1 * (x - r1)));
        dscores2.store(j, v, unless(hidden2, p2 * (x - r2)));  // p2 = -lambda P2
        block.weights.store(j, v, p1 + p2);
      }
      if constexpr (Lambda::uses_extra)
        store_dextra(block, v, map2.sum, -r2);
      else
        dlambda += sum_valid(block, v, -r2);
    }
    if constexpr (!Lambda::uses_extra) this->chain_lambda(block.head, dlambda, grad);
  }

  // In long hand: weights of one row, given its visible scores (rows[map][key]).
  template <class S>
  [[nodiscard]] std::vector<S> reference(const std::vector<std::vector<S>>& rows, Index h,
                                         const S& extra) const {
    std::vector<S> weights = long_hand_softmax(rows[0]);
    const std::vector<S> second = long_hand_softmax(rows[1]);
    const S factor = this->lambda_of(h, extra);
    for (std::size_t j = 0; j < weights.size(); ++j) weights[j] = weights[j] - factor * second[j];
    return weights;
  }

 private:
  struct RowSums {
    P sum, product;  // of exp(s - max), and of exp(s - max) X
  };
  static constexpr Index kBlock = 64;
  static constexpr int kHidden = -1;  // stands among the exponentials, which are not negative

  [[nodiscard]] P lane_lambda(const RowBlock<Real>& block, int v, P head_lambda) const {
    if constexpr (Lambda::uses_extra)
      return this->lambda_of(block.head, P::load(block.extra + v * kLanes<Real>));
    else
      return head_lambda;
  }

  // What the exponent subtracts: 0 where no key is seen.
  [[nodiscard]] static P base(const Real* score_max, int v) {
    const P top = P::load(score_max + v * kLanes<Real>);
    return select(top == P(-kInfinity<Real>), P(Real(0)), top);
  }
  [[nodiscard]] static P exponential(P score, P base) {
    return exp2_weight((score - base) * Real(kLog2e));
  }
  template <class Mask>
  [[nodiscard]] static P unless(Mask hidden, P x) {
    return select(hidden, P(Real(0)), x);
  }
  // 0 for a row that sees no key; NaN stays NaN.
  [[nodiscard]] static P inverse(P sum) {
    return select(sum == P(Real(0)), P(Real(0)), Real(1) / sum);
  }

  // Scores of vector v become exponentials, 0 where hidden; returns their sum.
  [[nodiscard]] static P exponentiate(const LaneTile<Real>& scores, const Real* score_max, int v) {
    const P top = base(score_max, v);
    P sum = Real(0);
    for (Index first = 0; first < scores.rows; first += kBlock) {
      P part = Real(0);
      for (Index j = first; j < std::min(first + kBlock, scores.rows); ++j) {
        const P e = exponential(scores.load(j, v), top);
        scores.store(j, v, e);
        part += e;
      }
      sum += part;
    }
    return sum;
  }

  // The same from scores[map] into dscores[map], kHidden where hidden; and the sum of e X.
  [[nodiscard]] static RowSums exponentiate_with(const RowBlock<Real>& block, std::size_t map,
                                                 int v) {
    const LaneTile<Real>&scores = block.scores[map], &out = block.dscores[map];
    const P top = base(block.score_max[map], v);
    RowSums sums{Real(0), Real(0)};
    for (Index first = 0; first < scores.rows; first += kBlock) {
      RowSums part{Real(0), Real(0)};
      for (Index j = first; j < std::min(first + kBlock, scores.rows); ++j) {
        const P score = scores.load(j, v), e = exponential(score, top);
        const auto hidden = score == P(-kInfinity<Real>);
        out.store(j, v, select(hidden, P(kHidden), e));
        part.sum += e;
        part.product =
            select(hidden, part.product, mul_add(e, block.dweights.load(j, v), part.product));
      }
      sums.sum += part.sum;
      sums.product += part.product;
    }
    return sums;
  }

  static void store_lse(const RowBlock<Real>& block, std::size_t map, int v, P sum) {
    const P lse = base(block.score_max[map], v) + math::log(sum);
    lse.store(block.lse[map] + v * kLanes<Real>);  // log(0) = -infinity
  }

  void store_dextra(const RowBlock<Real>& block, int v, P sum, P dlambda) const {
    const Index at = v * kLanes<Real>;
    const P dextra = dlambda * this->lambda_slope(P::load(block.extra + at));
    select(sum == P(Real(0)), P(Real(0)), dextra).store(block.dextra + at);
  }

  [[nodiscard]] static double sum_valid(const RowBlock<Real>& block, int v, P x) {
    std::array<Real, std::size_t(kLanes<Real>)> lanes;
    x.store(lanes.data());
    const Index valid = block.valid_lanes - v * kLanes<Real>;
    return sum_valid_lanes(lanes.data(), std::clamp<Index>(valid, 0, kLanes<Real>));
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
// the norm's factor 1 - lambda_init belong together. `vectors` are lambda_q1, lambda_k1, lambda_q2
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
