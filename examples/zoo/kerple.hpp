// SPDX-License-Identifier: Apache-2.0
#pragma once

// KERPLE in its logarithmic form: scores fall with the logarithm of the distance of query and key.
//
//   score_ij = s q_i.k_j - strength_h log(1 + rate_h |i - j|)
//
// Source  T.-C. Chi et al., KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation (2022).

#include "kit.hpp"

namespace zoo::kerple {

template <class T>
struct Score {
  heed::Param<T> strength = T(1), rate = T(1);
  static constexpr auto parameters =
      std::tuple{heed::named("strength", &Score::strength, heed::Range::positive),
                 heed::named("rate", &Score::rate, heed::Range::positive)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * heed::math::log(S(1.0 + p[1] * heed::distance(pair)));
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:kerple", "logarithmic form", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const double strength = op.score.strength.head(row.head), rate = op.score.rate.head(row.head);
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j)
    scores[j] -= strength * std::log1p(rate * std::abs(double(row.position - row.positions[j])));
  return mixed(row, softmax(scores));
}

}  // namespace zoo::kerple
