// SPDX-License-Identifier: Apache-2.0
#pragma once

// T5's bias: a learnt number per head for each bucket of distances; near distances have buckets of their own, farther ones
// share buckets that widen in equal ratios.
//
//   score_ij = s q_i.k_j + b_h(bucket of |i - j|)       buckets 0, 1, 2, 3, 4 to 6, 7 to 11, 12 to 19, 20 and more
//
// Source  C. Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020). There
//         are 32 buckets up to distance 128, and those of later keys are others.

#include "kit.hpp"

namespace zoo::t5 {

template <class T>
struct Score {
  heed::Param<T> b0 = T(0), b1 = T(0), b2 = T(0), b3 = T(0), b4 = T(0), b5 = T(0), b6 = T(0),
                 b7 = T(0);
  static constexpr auto parameters = std::tuple{
      heed::named("b0", &Score::b0), heed::named("b1", &Score::b1), heed::named("b2", &Score::b2),
      heed::named("b3", &Score::b3), heed::named("b4", &Score::b4), heed::named("b5", &Score::b5),
      heed::named("b6", &Score::b6), heed::named("b7", &Score::b7)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    constexpr double ends[] = {0.5, 1.5, 2.5, 3.5, 6.5, 11.5, 19.5};
    const auto distance = heed::math::value_of(heed::distance(pair));
    using Distance = std::remove_cv_t<decltype(distance)>;
    S bias = p[7];
    for (std::size_t b = 7; b-- > 0;)
      bias = heed::math::select(distance < heed::math::constant<Distance>(ends[b]), S(p[b]), bias);
    return pair.logit + bias;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:t5", "8 buckets", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto& s = op.score;
  const heed::Param<double>* buckets[] = {&s.b0, &s.b1, &s.b2, &s.b3, &s.b4, &s.b5, &s.b6, &s.b7};
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const std::ptrdiff_t distance = std::abs(row.position - row.positions[j]);
    int bucket = int(distance);
    if (distance >= 4) bucket = distance < 7 ? 4 : distance < 12 ? 5 : distance < 20 ? 6 : 7;
    scores[j] += buckets[bucket]->head(row.head);
  }
  return mixed(row, softmax(scores));
}

}  // namespace zoo::t5
