// SPDX-License-Identifier: Apache-2.0
#pragma once

// Talking heads: heads mix their scores before the softmax and their weights behind it.
//
//   w_h = sum_n out_hn softmax(sum_m in_nm s_m)       n, m: the heads of the group of h
//
// Groups are of four heads; of two, or of one, where the number of heads is no multiple. With four heads all talk with all.
// Each output head computes the scores of its whole group: attention of G heads costs what that of G^2 does.
//
// Source  N. Shazeer et al., Talking-Heads Attention (2020), where all heads mix with all.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::talking_heads {

constexpr Index group_of(Index heads) { return heads % 4 == 0 ? 4 : heads % 2 == 0 ? 2 : 1; }

template <class T>
struct Talking : heed::PlainRows {
  static constexpr int maps = 4;  // maps beyond the group have no part
  heed::Param<T> in, out;
  std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, maps}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("in", &Talking::in, &Talking::shape),
                 heed::tensor("out", &Talking::out, &Talking::shape)};
  heed::Source source(const heed::Geometry& g, Index h, int map) const {
    const Index size = group_of(g.heads);
    return heed::whole_head(g, h / size * size + map % size);
  }

  auto forward(const auto& row) const {
    const Index size = group_of(in.extent(0)), first = row.head() / size * size;
    const auto entry = [&](const heed::Param<T>& matrix, Index h, Index m) {
      return (m < size ? 1 : 0) * row.learnt(matrix, m < size ? h * maps + m : 0);
    };
    return over_heads([&](auto... n) {
      const auto softmax = [&](Index head) {
        return row.softmax(((entry(in, head, n) * row.score(n)) + ...));
      };
      return ((entry(out, row.head(), n) * softmax(first + n % size)) + ...);
    });
  }

 private:
  static auto over_heads(const auto& f) { return f(0, 1, 2, 3); }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Talking<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.normaliser.in = op.normaliser.out = heed::Param<T>(op.normaliser.shape(g));
  return {"zoo:talking-heads", "groups of four", g, op, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto& n = op.normaliser;
  const std::ptrdiff_t size = group_of(n.in.extent(0)), first = row.head / size * size;
  Numbers weights(row.keys.size());
  for (std::ptrdiff_t m = 0; m < size; ++m) {
    Numbers z(row.keys.size());
    for (std::ptrdiff_t k = 0; k < size; ++k) {
      const Numbers scores = logits(row.heads[first + k]);
      for (std::size_t j = 0; j < z.size(); ++j) z[j] += n.in[(first + m) * 4 + k] * scores[j];
    }
    z = softmax(z);
    for (std::size_t j = 0; j < z.size(); ++j) weights[j] += n.out[row.head * 4 + m] * z[j];
  }
  return mixed(row, weights);
}

}  // namespace zoo::talking_heads
