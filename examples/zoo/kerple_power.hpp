// SPDX-License-Identifier: Apache-2.0
#pragma once

// KERPLE in its power form: scores fall with a power of the distance of query and key.
//
//   score_ij = s q_i.k_j - strength_h |i - j|^power_h       0 < power < 2
//
// Source  T.-C. Chi et al., KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation (2022).

#include "kit.hpp"

namespace zoo::kerple_power {

template <class T>
struct Score {
  heed::Param<T> strength = T(0.5), power = T(0.5);
  static constexpr auto parameters = std::tuple{
      heed::named("strength", &Score::strength, heed::Range::positive),
      heed::named("power", &Score::power, heed::Interval{0, 2, "it must lie in (0, 2)"})};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S distance = heed::distance(pair);
    const S risen =
        heed::math::exp(S(p[1] * heed::math::log(heed::math::maximum(distance, S(0.5)))));
    const auto here = heed::math::value_of(distance);
    return pair.logit - p[0] * heed::math::select(here < decltype(here)(0.5), S(0.0), risen);
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:kerple-power", "power form", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const double strength = op.score.strength.head(row.head), power = op.score.power.head(row.head);
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j)
    scores[j] -= strength * std::pow(std::abs(double(row.position - row.positions[j])), power);
  return mixed(row, softmax(scores));
}

}  // namespace zoo::kerple_power
