// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scalable softmax: scores grow with the logarithm of the number of keys, so that a long row stays as sharp as a short one.
//
//   score_ij = strength_h log n_i (s q_i.k_j)       n_i: keys that query i sees
//
// Source  K. Nakanishi, Scalable-Softmax Is Superior for Attention (2025). Here n counts the visible keys.

#include "kit.hpp"

namespace zoo::ssmax {

template <class T>
struct Score {
  using Features = heed::LogVisible;  // pair.query[0] = log n
  heed::Param<T> strength =
      T(0.43);  // about 1 / log 10: a row of ten keys is as sharp as under a softmax
  static constexpr auto parameters =
      std::tuple{heed::named("strength", &Score::strength, heed::Range::positive)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.query[0] * pair.logit;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:ssmax", "strength log n", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  const double n = double(scores.size());
  for (double& s : scores) s *= op.score.strength.head(row.head) * std::log(n);
  return mixed(row, softmax(scores));
}

}  // namespace zoo::ssmax
