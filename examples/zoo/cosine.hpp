// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cosine attention with a learnt temperature per head: scores do not grow with the norms of queries and keys.
//
//   score_ij = temperature_h cos(q_i, k_j)
//
// Source  A. Henry et al., Query-Key Normalization for Transformers (2020); Z. Liu et al., Swin Transformer V2 (2022),
//         which divides by a temperature of at least 0.01 and adds a bias of positions. Here the factor itself is
//         learnt, and there is no bias.

#include "kit.hpp"

namespace zoo::cosine {

template <class T>
struct Score {
  heed::Param<T> temperature = T(10);
  static constexpr auto parameters =
      std::tuple{heed::named("temperature", &Score::temperature, heed::Range::positive)};
  using Features = heed::InverseNorms;
  using PlaceFree = Score;
  using NormedDots = Score;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * heed::cosine(pair);
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:cosine", "learnt temperature", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto norm = [](const Numbers& x) { return std::sqrt(dot(x, x)) + 1e-8; };
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 return op.score.temperature.head(row.head) * dot(row.query, row.keys[j]) /
                        (norm(row.query) * norm(row.keys[j]));
               })));
}

}  // namespace zoo::cosine
