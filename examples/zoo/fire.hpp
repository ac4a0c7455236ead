// SPDX-License-Identifier: Apache-2.0
#pragma once

// FIRE: a small network maps the distance, relative to the query's position, to a bias.
//
//   score_ij = s q_i.k_j + sum_m out_m relu(in_m x + shift_m)       x = log(1 + c |i - j|) / log(1 + c max(i, L))
//
// Source  S. Li et al., Functional Interpolation for Relative Positions Improves Long Context Transformers (2023). Here
//         the network has two hidden numbers per head, c and L are learnt per head as there.

#include "kit.hpp"

namespace zoo::fire {

template <class T>
struct Score {
  heed::Param<T> c = T(0.1),
                 threshold = T(16.5);  // between positions: at a tie maximum() has two slopes
  heed::Param<T> in1 = T(1), shift1 = T(0.1), out1 = T(-1), in2 = T(-1), shift2 = T(0.5),
                 out2 = T(0.5);
  static constexpr auto parameters =
      std::tuple{heed::named("c", &Score::c, heed::Range::positive),
                 heed::named("threshold", &Score::threshold, heed::Range::positive),
                 heed::named("in1", &Score::in1),
                 heed::named("shift1", &Score::shift1),
                 heed::named("out1", &Score::out1),
                 heed::named("in2", &Score::in2),
                 heed::named("shift2", &Score::shift2),
                 heed::named("out2", &Score::out2)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S farthest = heed::math::maximum(S(p[1]), S(pair.query_index));
    const S x = heed::math::log(S(1.0 + p[0] * heed::distance(pair))) /
                heed::math::log(S(1.0 + p[0] * farthest));
    const S first = heed::math::maximum(S(p[2] * x + p[3]), S(0.0));
    const S second = heed::math::maximum(S(p[5] * x + p[6]), S(0.0));
    return pair.logit + p[4] * first + p[7] * second;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:fire", "two hidden numbers", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto& f = op.score;
  const auto h = row.head;
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double distance = std::abs(double(row.position - row.positions[j]));
    const double farthest = std::max(double(row.position), f.threshold.head(h));
    const double x = std::log1p(f.c.head(h) * distance) / std::log1p(f.c.head(h) * farthest);
    scores[j] += f.out1.head(h) * std::max(0.0, f.in1.head(h) * x + f.shift1.head(h)) +
                 f.out2.head(h) * std::max(0.0, f.in2.head(h) * x + f.shift2.head(h));
  }
  return mixed(row, softmax(scores));
}

}  // namespace zoo::fire
