// SPDX-License-Identifier: Apache-2.0
#pragma once

// Entmax with alpha 1.5: between softmax and sparsemax; keys far below the best get weight 0.
//
//   w_j = u_j^2       u_j = max(0, (s_j - top) / 2 - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = u_j (G_j - sum_k u_k G_k / sum_k u_k)       G = dL/dw
//
// Source  B. Peters, V. Niculae, A. Martins, Sparse Sequence-to-Sequence Models (2019), which sort or bisect.

#include "entmax.hpp"

namespace zoo::entmax15 {

template <class T>
struct Entmax15 : EntmaxRows<T, 2> {
  using PlaceFree = Entmax15;

  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const auto c = [](double x) { return heed::math::constant<S>(x); };
    double top = -heed::kInfinity<double>;
    for (const S& s : row.scores[0]) top = std::max(top, double(heed::math::value_of(s)));
    S t = c(-1);
    const auto above = [&](const S& s) {
      return heed::math::maximum(c(0), S(c(0.5) * (s - c(top)) - t));
    };
    for (int step = 0; step < 25; ++step) {
      S sum = c(0), squares = c(-1);
      for (const S& s : row.scores[0]) sum += above(s), squares += above(s) * above(s);
      t = t + squares / (sum + sum);
    }
    for (S& s : row.scores[0]) s = above(s) * above(s);
    return row.scores[0];
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Entmax15<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:entmax15", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers scores = logits(row);
  double low = -1e3, high = 1e3;  // the threshold lies between
  const auto weight = [&](double s) { return std::pow(std::max(0.0, s / 2 - low), 2); };
  for (int step = 0; step < 100; ++step) {
    const double kept = low, middle = (low + high) / 2;
    low = middle;
    double sum = 0;
    for (const double s : scores) sum += weight(s);
    if (sum >= 1) continue;
    low = kept;
    high = middle;
  }
  for (double& s : scores) s = weight(s);
  return mixed(row, scores);
}

}  // namespace zoo::entmax15
