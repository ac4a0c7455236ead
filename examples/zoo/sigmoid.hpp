// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sigmoid attention: each key gets its weight without regard to the others.
//
//   w_j = sigmoid(s_j - log n)       s_j = scale q.k_j + bias_h     n: keys that the row sees
//   ds_j = w_j (1 - w_j) G_j         G = dL/dw
//
// Source  J. Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention (2024): the bias is minus
//         the logarithm of the length. Here n counts the visible keys, and a number per head is learnt in addition.

#include "kit.hpp"

#include <heed/plug/streaming.hpp>

namespace zoo::sigmoid {

template <class T>
struct Score {
  heed::Param<T> bias = T(0);
  static constexpr auto parameters = std::tuple{heed::named("bias", &Score::bias)};
  using PlaceFree = Score;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[0];
  }
};

template <class T>
struct Sigmoid : heed::StreamedRows<T, 1> {
  using Base = heed::StreamedRows<T, 1>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  static constexpr bool counts_visible = true;
  using PlaceFree = Sigmoid;

  State begin(const Queries& queries) const {
    return {P(T(0)), {heed::math::log(max(P(T(1)), queries.visible))}};  // log n
  }
  P weight(const State& state, P s) const {
    return zero_where(heed::is_hidden(s), heed::math::sigmoid(P(s - state.own[0])));
  }
  P dscore(const State& state, P s, P weight, P pull, P) const {
    return zero_where(heed::is_hidden(s), weight * heed::math::sigmoid(P(state.own[0] - s)) * pull);
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S log_n = heed::math::constant<S>(std::log(double(row.scores[0].size())));
    for (S& s : row.scores[0]) s = heed::math::sigmoid(S(s - log_n));
    return row.scores[0];
  }
};

template <class T>
using Op = Attention<T, heed::OwnScore<Score, T>, Sigmoid<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sigmoid", "bias - log n", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers weights = logits(row);
  const double n = double(weights.size());
  for (double& s : weights) s = 1 / (1 + n * std::exp(-s - op.score.bias.head(row.head)));
  return mixed(row, weights);
}

}  // namespace zoo::sigmoid
