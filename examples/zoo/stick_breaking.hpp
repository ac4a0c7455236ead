// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stick-breaking attention: from the newest key to the oldest, each takes its share of the weight
// that the newer ones have left.
//
//   w_j = b_j prod_{k > j} (1 - b_k)       b_j = sigmoid(s_j), j and k over the keys that the row sees
//
// Source  S. Tan et al., Stick-breaking Attention (2024). There a query sees only keys before its
//         own; here it sees all keys that the mask shows.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::stick_breaking {

template <class T>
struct StickBreaking : heed::PlainRows {
  using PlaceFree = StickBreaking;

  auto forward(const auto& row) const {
    const auto share = heed::math::sigmoid(row.score());
    return share * row.product_behind(1 - share);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, StickBreaking<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:stick-breaking", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const Numbers scores = logits(row);
  Numbers weights;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    double weight = 1 / (1 + std::exp(-scores[j]));
    for (std::size_t k = j + 1; k < scores.size(); ++k)
      weight *= 1 - 1 / (1 + std::exp(-scores[k]));
    weights.push_back(weight);
  }
  return mixed(row, weights);
}

}  // namespace zoo::stick_breaking
