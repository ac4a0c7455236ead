// SPDX-License-Identifier: Apache-2.0
#pragma once

// Learnt keys without a value, which take weight from the keys of the sequence by how much a query looks like them.
//
//   w_j = exp(s q.k_j) / (sum_r exp(s q.sink_r) + sum_k exp(s q.k_k))       sink (heads, n, dim_qk) learnt
//
// Source  G. Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023), whose sinks are tokens with keys
//         and values; with a value of 0, E. Miller, Attention Is Off By One (2023), where the key is 0, too.

#include "kit.hpp"

namespace zoo::key_sink {

template <class T>
struct Rows : heed::Softmax<T> {
  using Mergeable = Rows;
  heed::Param<T> keys;
  std::vector<Index> key_shape(const heed::Geometry& g) const { return {g.heads, -1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("keys", &Rows::keys, &Rows::key_shape)};
  static constexpr auto learnt_keys = &Rows::keys;
};
template <class T>
using Op = Attention<T, heed::DotScore<T>, Rows<T>>;
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.normaliser.keys = heed::Param<T>(std::vector<Index>{g.heads, 2, g.dim_qk});
  return {"zoo:key-sink", "2 sinks", g, op, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  PlainRow all = row;
  const auto d = std::ptrdiff_t(row.query.size()), dv = std::ptrdiff_t(row.own_value.size());
  for (std::ptrdiff_t r = 2 * row.head; r < 2 * row.head + 2; ++r) {
    const double* key = op.normaliser.keys.data() + r * d;
    all.keys.push_back(Numbers(key, key + d));
    all.values.push_back(Numbers(std::size_t(dv), 0.0));
  }
  return mixed(all, softmax(logits(all)));
}

}  // namespace zoo::key_sink
