// SPDX-License-Identifier: Apache-2.0
#pragma once

// T5's bias: a learnt number per head for each of 32 buckets of distances, 16 to either side. Distances up to 7 have buckets
// of their own, farther ones share buckets that widen in equal ratios up to distance 128.
//
//   score_ij = s q_i.k_j + table_h[bucket(i - j)]
//
// Source  C. Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020), whose
//         logits are not divided by the root of the width.

#include "kit.hpp"

namespace zoo::t5 {

template <class T>
struct Score {
  heed::Param<T> table;  // (heads, 32)
  std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, 32}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("table", &Score::table, &Score::shape)};
  static constexpr auto positions = &Score::table;

  Index bucket(Index distance) const {
    const Index far = std::abs(distance), side = distance < 0 ? 16 : 0;
    if (far < 8) return side + far;
    return side + std::min<Index>(15, 8 + Index(8 * std::log(double(far) / 8) / std::log(16.0)));
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.position;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

// Starts with a slight preference for near keys.
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.score.table = heed::Param<T>(std::vector<Index>{g.heads, 32});
  for (Index n = 0; n < op.score.table.size(); ++n) op.score.table[n] = T(-0.02) * T(n % 16);
  return {"zoo:t5", "32 buckets", g, op};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double distance = double(row.position - row.positions[j]);
    double bucket = std::abs(distance);
    if (bucket >= 8)
      bucket = std::min(15.0, std::floor(8 + 8 * std::log(bucket / 8) / std::log(16.0)));
    if (distance < 0) bucket += 16;
    scores[j] += op.score.table[row.head * 32 + std::ptrdiff_t(bucket)];
  }
  return mixed(row, softmax(scores));
}

}  // namespace zoo::t5
