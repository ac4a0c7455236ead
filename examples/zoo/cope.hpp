// SPDX-License-Identifier: Apache-2.0
#pragma once

// Contextual position encoding: a key's position counts the tokens behind it, as far as the query's gates let them count.
//
//   w = softmax(s_j + z(p_j))       p_j = sum_{k >= j} sigmoid(s_k), over the keys that the row sees, at most 63
//   z_n = q . e_n, and z(p) lies on the line between z_n and z_(n+1) for n <= p <= n + 1       e: 64 learnt vectors
//
// Source  O. Golovneva, T. Wang, J. Weston, S. Sukhbaatar, Contextual Position Encoding (2024), in causal attention. There
//         the queries have the scale of s; here e has it.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::cope {

template <class T>
struct Cope : heed::PlainRows {
  static constexpr bool uses_query = true;
  heed::Param<T> positions;
  std::vector<Index> shape(const heed::Geometry& g) const { return {64, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("positions", &Cope::positions, &Cope::shape)};

  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto position = row.sum_from(heed::math::sigmoid(s));
    return row.softmax(s + row.interpolate(row.products(positions), position));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Cope<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.normaliser.positions = heed::Param<T>(op.normaliser.shape(g));
  return {"zoo:cope", "64 positions", g, op, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  const auto product = [&](std::ptrdiff_t n) {
    const auto width = std::ptrdiff_t(row.query.size());
    double z = 0;
    for (std::ptrdiff_t c = 0; c < width; ++c)
      z += row.query[std::size_t(c)] * op.normaliser.positions[n * width + c];
    return z;
  };
  double position = 0;
  for (std::size_t j = scores.size(); j-- > 0;) {
    position += 1 / (1 + std::exp(-scores[j]));
    const double p = std::min(63.0, position), below = std::floor(p);
    const auto n = std::ptrdiff_t(below);
    scores[j] += (1 - (p - below)) * product(n) + (p > below ? (p - below) * product(n + 1) : 0);
  }
  return mixed(row, softmax(scores));
}

}  // namespace zoo::cope
