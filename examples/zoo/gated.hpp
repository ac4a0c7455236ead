// SPDX-License-Identifier: Apache-2.0
#pragma once

// A gate for each head and token, from the query's row: it decides how much of the head's output passes.
//
//   out = sigmoid(q . w_h + b_h) y       y the mixed row, w (heads, dim_qk) and b (heads) learnt
//
// Source  Z. Qiu et al., Gated Attention for Large Language Models (2025), head by head, arXiv 2505.06708.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

namespace zoo::gated {

template <class T>
struct Gated : heed::FormulaReadout {
  static constexpr bool uses_query = true, gates = true;
  heed::Param<T> weight, bias = T(0);
  std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, g.dim_qk}; }
  static constexpr auto parameters = std::tuple{
      heed::tensor("weight", &Gated::weight, &Gated::shape), heed::named("bias", &Gated::bias)};
  auto forward(const auto& row) const {
    const auto gate = row.sum(row.query() * row.learnt_row(weight)) + row.learnt(bias);
    return heed::math::sigmoid(gate) * row.mixed();
  }
};
template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Gated<T>>;
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.readout.weight = heed::Param<T>(std::vector<Index>{g.heads, g.dim_qk});
  return {"zoo:gated", "", g, op};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto d = std::ptrdiff_t(row.query.size());
  double gate = op.readout.bias.head(row.head);
  for (std::ptrdiff_t c = 0; c < d; ++c)
    gate += row.query[std::size_t(c)] * op.readout.weight[row.head * d + c];
  Numbers out = mixed(row, softmax(logits(row)));
  for (double& x : out) x /= 1 + std::exp(-gate);
  return out;
}

}  // namespace zoo::gated
