// SPDX-License-Identifier: Apache-2.0
#pragma once

// Exclusive self attention: what a row mixes has no part along the value of its own token.
//
//   out_i = y_i - (y_i . u_i) u_i       y the mixed row, u_i = v_i / max(|v_i|, 1e-12), v_i the value of query i's own token
//
// Source  arXiv 2603.09078.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

namespace zoo::exclusive {

template <class T>
struct Exclusive : heed::FormulaReadout {
  static constexpr bool uses_own_rows = true;
  auto forward(const auto& row) const {
    const auto y = row.mixed(), v = row.own_value();
    return y - row.sum(y * v) / heed::math::maximum(row.sum(v * v), 1e-24) * v;
  }
};
template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Exclusive<T>>;
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:exclusive", "", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers out = mixed(row, softmax(logits(row)));
  const double norm = std::max(std::sqrt(dot(row.own_value, row.own_value)), 1e-12),
               along = dot(out, row.own_value) / norm;
  for (std::size_t c = 0; c < out.size(); ++c) out[c] -= along * row.own_value[c] / norm;
  return out;
}

}  // namespace zoo::exclusive
