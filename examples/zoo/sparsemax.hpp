// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sparsemax: the weights are the point of the simplex that lies nearest to the scores; many are 0.
//
//   w_j = max(0, s_j - top - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = G_j - mean of G over the keys with w > 0, for these; else 0       G = dL/dw
//
// Source  A. Martins, R. Astudillo, From Softmax to Sparsemax (2016), which sort.

#include "entmax.hpp"

namespace zoo::sparsemax {

template <class T>
struct Sparsemax : EntmaxRows<T, 1> {
  using PlaceFree = Sparsemax;

  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const auto c = [](double x) { return heed::math::constant<S>(x); };
    const auto value = [](const S& s) { return double(heed::math::value_of(s)); };
    std::vector<S> kept = row.scores[0];  // with a weight above 0
    S t = c(0);
    for (std::size_t before = 0; before != kept.size();) {
      before = kept.size();
      t = c(-1);
      for (const S& s : kept) t += s;
      t = t / c(double(before));
      std::erase_if(kept, [&](const S& s) { return value(s) <= value(t); });
    }
    for (S& s : row.scores[0]) s = heed::math::maximum(c(0), S(s - t));
    return row.scores[0];
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sparsemax<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sparsemax", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers scores = logits(row);
  double low = -1e3, high = 1e3;  // the threshold lies between
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    double sum = 0;
    for (const double s : scores) sum += std::max(0.0, s - middle);
    (sum >= 1 ? low : high) = middle;
  }
  for (double& s : scores) s = std::max(0.0, s - low);
  return mixed(row, scores);
}

}  // namespace zoo::sparsemax
