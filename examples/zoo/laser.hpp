// SPDX-License-Identifier: Apache-2.0
#pragma once

// LASER: exponentials of the values are mixed, and the output is the logarithm of what they add up to.
//
//   out = log(sum_j p_j exp(v_j))       column by column, p = softmax(s)
//
// The derivative with respect to the scores is not small where the weights are near 0 or 1, as softmax's own is.
//
// Bounds  values in [-87, 88] (float), and those that a row mixes in one column at most 80 apart: smaller ones vanish beside
//         the largest. A constant that moves them there is the caller's to subtract and to add again: a maximum over all keys
//         would let later tokens change earlier rows. A query that sees no key has output 0.
// Source  arXiv 2411.03493.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

#include <limits>

namespace zoo::laser {

template <class T>
struct Laser : heed::FormulaReadout {
  static constexpr bool uses_lse = true;
  auto value(const auto& x) const { return heed::math::exp(x); }
  auto forward(const auto& row) const {
    constexpr double lowest = std::numeric_limits<float>::lowest();
    return heed::math::select(row.lse() < lowest, 0, heed::math::log(row.mixed()));
  }
};
template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Laser<T>>;
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:laser", "", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  PlainRow of = row;
  for (Numbers& value : of.values)
    for (double& x : value) x = std::exp(x);
  Numbers out = mixed(of, softmax(logits(of)));
  for (double& x : out) x = row.keys.empty() ? 0 : std::log(x);
  return out;
}

}  // namespace zoo::laser
