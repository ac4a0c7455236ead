// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ops as a new user writes them: scores that read positions, distances and features of rows, a row
// normaliser and a readout; and for each its formula in plain loops.

#include <heed/plug/own_score.hpp>
#include <heed/plug/row_kit.hpp>

#include "fuzz/plain.hpp"

namespace fuzz {

// score = logit + a cos(q, k) - slope |i - j|
template <class T>
struct Recency {
  heed::Param<T> slope = T(0.5), angle = T(0.3);
  static constexpr auto parameters =
      std::tuple{heed::named("slope", &Recency::slope), heed::named("angle", &Recency::angle)};
  using Features = heed::InverseNorms;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[1] * heed::cosine(pair) - p[0] * heed::distance(pair);
  }
};
struct RecencyFormula : SoftmaxFormula {  // 0 slope, 1 angle
  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index, Index h, Index i, const S* q, const S* k,
                        Index width, const S& product, const S& logit, PlainResult<S>&,
                        Index j) const {
    const S c = product / (norm(q, width) + S(1e-8)) / (norm(k, width) + S(1e-8));
    return logit + p.param(1, h) * c -
           p.param(0, h) * S(std::abs(double(p.sizes.first_query + i - j)));
  }
};

// score = logit + height exp(-|q - k|^2 / 20) + tanh(0.05 i - 0.03 j) tanh(q.k)
template <class T>
struct Bump {
  heed::Param<T> height = T(0.4);
  static constexpr auto parameters = std::tuple{heed::named("height", &Bump::height)};
  using Features = heed::SquaredNorms;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    namespace math = heed::math;
    const S place = math::tanh(S(0.05 * pair.query_index - 0.03 * pair.key_index));
    return pair.logit + p[0] * math::exp(S(-heed::squared_distance(pair) / 20.0)) +
           place * math::tanh(pair.dot);
  }
};
struct BumpFormula : SoftmaxFormula {  // 0 height
  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index, Index h, Index i, const S* q, const S* k,
                        Index width, const S& product, const S& logit, PlainResult<S>&,
                        Index j) const {
    S apart = 0;
    for (Index c = 0; c < width; ++c) apart += (q[c] - k[c]) * (q[c] - k[c]);
    return logit + p.param(0, h) * exp(-apart / S(20.0)) +
           S(std::tanh(0.05 * double(p.sizes.first_query + i) - 0.03 * double(j))) * tanh(product);
  }
};

// score = -rate sum_c (q_c - k_c) tanh(q_c - k_c), a sum of columns that no product gives
template <class T>
struct Apart {
  heed::Param<T> rate = T(0.3);
  static constexpr auto parameters = std::tuple{heed::named("rate", &Apart::rate)};
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    const S apart = q[0] - k[0];
    return apart * heed::math::tanh(apart);
  }
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -p[0] * pair.dot;
  }
};
struct ApartFormula : SoftmaxFormula {  // 0 rate
  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index, Index h, Index, const S* q, const S* k,
                        Index width, const S&, const S&, PlainResult<S>&, Index) const {
    S sum = 0;
    for (Index c = 0; c < width; ++c) sum += (q[c] - k[c]) * tanh(q[c] - k[c]);
    return -p.param(0, h) * sum;
  }
};

// The mean of a row, and its derivative.
struct MeanFeature {
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row) {
    S sum = heed::math::constant<S>(0);
    for (Index c = 0; c < row.dim(); ++c) sum = sum + row.x(c);
    return sum / heed::math::constant<S>(double(row.dim()));
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S&, const S& df, const Add& add) {
    const S share = df / heed::math::constant<S>(double(row.dim()));
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, share);
  }
};

// score = logit + w mean(q) mean(k), its derivative by hand.
template <class T>
struct Means {
  heed::Param<T> weight = T(0.7);
  static constexpr auto parameters = std::tuple{heed::named("weight", &Means::weight)};
  using Features = heed::BothRows<MeanFeature>;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[0] * pair.query[0] * pair.key[0];
  }
  template <class S>
  void score_vjp(const auto& pair, const auto& p, S g, auto& d, auto& dp) const {
    d.logit = g;
    d.query[0] = g * p[0] * pair.key[0];
    d.key[0] = g * p[0] * pair.query[0];
    dp[0] += g * pair.query[0] * pair.key[0];
  }
};

// weight_j = exp(s_j) / (exp(b) + sum_k exp(s_k)): a softmax with a sink of learnt height b.
template <class T>
struct Sink : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> height = T(0);
  bool shares = false;  // heads 2n and 2n + 1 both read query head 2n

  static constexpr auto parameters =
      std::tuple{heed::named("height", &Sink::height), heed::option("shares", &Sink::shares)};
  [[nodiscard]] heed::Source source(const heed::Geometry& g, Index h, int) const {
    return {shares ? h / 2 * 2 : h, g.kv_head(h), 0, 0, g.dim_qk};
  }
  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) (void)weigh(block, v, block.scores[0]);
  }
  void vjp(const heed::RowBlock<T>& block, Sink& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = weigh(block, v, block.dscores[0]);
      const P r = heed::softmax_row_vjp(block, v);
      grad.height.head(block.head) -= T(heed::sum_valid_lanes(share * r, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    row.scores[0].push_back(height.head(row.head));
    std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
    weights.pop_back();
    return weights;
  }

 private:
  // Weights of vector v; returns the share of the sink.
  P weigh(const heed::RowBlock<T>& block, int v, const heed::LaneTile<T>& weights) const {
    const auto [top, sum] = heed::exponentiate_row(block, v, weights);
    const P b = height.head(block.head);
    heed::scale_row(weights, v, P(T(1) / (sum + heed::math::exp(P(b - top)))));
    return T(1) / (T(1) + sum * heed::math::exp(P(top - b)));
  }
};

// out_c = factor_c mixed_c
template <class T>
struct ColumnFactors : heed::PlainReadout {
  static constexpr bool saves_mixed = true;
  heed::Param<T> factor;

  [[nodiscard]] std::vector<Index> factor_shape(const heed::Geometry& g) const { return {g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("factor", &ColumnFactors::factor, &ColumnFactors::factor_shape)};
  void forward(const heed::ReadoutPanel<T>& panel) const {
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.tile.store(c, v, panel.tile.load(c, v) * factor[c]);
  }
  void vjp(const heed::ReadoutPanel<T>& panel, ColumnFactors& grad) const {
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v) {
        const heed::Pack<T> g = panel.tile.load(c, v), mixed = panel.saved.load(c, v);
        grad.factor[c] += T(heed::sum_valid_lanes(g * mixed, v, panel.valid_lanes));
        panel.tile.store(c, v, g * factor[c]);
      }
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    for (std::size_t n = 0; n < all.out.size(); ++n)
      all.out[n] = all.out[n] * factor[Index(n) % all.geometry.dim_v];
  }
};

// Means, Sink and ColumnFactors together: 0 weight, 1 height, 2 factor (dim_v).
template <class T>
using OwnParts = heed::Attention<T, heed::OwnScore<Means, T>, Sink<T>, ColumnFactors<T>>;
struct OwnPartsFormula : SoftmaxFormula {
  bool shares = false;

  [[nodiscard]] PlainMap map(const Sizes& s, Index h, int) const {
    return {shares ? h / 2 * 2 : h, 0, 0, s.dim_qk};
  }
  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index, Index h, Index, const S* q, const S* k,
                        Index width, const S&, const S& logit, PlainResult<S>&, Index) const {
    S a = 0, b = 0;
    for (Index c = 0; c < width; ++c) a += q[c], b += k[c];
    return logit + p.param(0, h) * (a / S(double(width))) * (b / S(double(width)));
  }
  template <class S>
  [[nodiscard]] Weights<S> weigh(const Plain<S>& p, Index, Index h, Index,
                                 const std::vector<std::vector<S>>& scores) const {
    Weights<S> w;
    w.lse.resize(1);
    (void)softmax(scores[0], &w.lse[0]);
    std::vector<S> with_sink = scores[0];
    with_sink.push_back(p.param(1, h));
    w.weight = softmax(with_sink);
    w.weight.pop_back();
    return w;
  }
  template <class S>
  void read(const Plain<S>& p, PlainResult<S>& result) const {
    for (std::size_t n = 0; n < result.out.size(); ++n) {
      const S& factor = p.params[2][n % std::size_t(p.sizes.dim_v)];
      result.out[n] = result.out[n] * factor;
      result.terms[n] *= std::abs(value(factor));
    }
  }
};

}  // namespace fuzz
