// SPDX-License-Identifier: Apache-2.0
#pragma once

// Learnt keys and values in front of those of the sequence, the same for all sequences.
//
//   out = (sum_r e_r u_r + sum_j e_j v_j) / (sum_r e_r + sum_j e_j)       e = exp(s q.k), keys and values u of registers learnt
//
// Source  T. Darcet et al., Vision Transformers Need Registers (2023), whose registers are tokens of every layer; of one layer's
//         keys and values, X. L. Li, P. Liang, Prefix-Tuning (2021).

#include "kit.hpp"

namespace zoo::registers {

template <class T>
struct Rows : heed::Softmax<T> {
  using Mergeable = Rows;
  heed::Param<T> keys, values;
  std::vector<Index> key_shape(const heed::Geometry& g) const { return {g.heads, -1, g.dim_qk}; }
  std::vector<Index> value_shape(const heed::Geometry& g) const { return {g.heads, -1, g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("keys", &Rows::keys, &Rows::key_shape),
                 heed::tensor("values", &Rows::values, &Rows::value_shape)};
  static constexpr auto learnt_keys = &Rows::keys;
  static constexpr auto learnt_values = &Rows::values;
};
template <class T>
using Op = Attention<T, heed::DotScore<T>, Rows<T>>;
template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.normaliser.keys = heed::Param<T>(std::vector<Index>{g.heads, 2, g.dim_qk});
  op.normaliser.values = heed::Param<T>(std::vector<Index>{g.heads, 2, g.dim_v});
  return {"zoo:registers", "2 registers", g, op, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  PlainRow all = row;
  const auto d = std::ptrdiff_t(row.query.size()), dv = std::ptrdiff_t(row.own_value.size());
  for (std::ptrdiff_t r = 2 * row.head; r < 2 * row.head + 2; ++r) {
    const double* key = op.normaliser.keys.data() + r * d;
    all.keys.push_back(Numbers(key, key + d));
    const double* value = op.normaliser.values.data() + r * dv;
    all.values.push_back(Numbers(value, value + dv));
  }
  return mixed(all, softmax(logits(all)));
}

}  // namespace zoo::registers
