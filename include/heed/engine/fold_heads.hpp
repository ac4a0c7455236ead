// SPDX-License-Identifier: Apache-2.0
#pragma once

// One query per head, as in decoding: the heads that read one key-value head become the queries of one
// head, and share its keys, its values and their lanes.
//
//   (batch, kv_heads * group, 1, dim) -> (batch, kv_heads, group, dim), the same memory

#include <heed/engine/call.hpp>
#include <heed/mask/bound_mask.hpp>

namespace heed::inline HEED_ABI::detail {

// Not where a parameter, a table or an ALiBi slope belongs to a head, or a window hides the first keys; nor
// with dropout, which is drawn by head and query.
template <class Op, class Real>
[[nodiscard]] bool heads_fold(const Op& op, const Geometry& g, const Mask<Real>& mask,
                              const BoundMask<Real>& bound, const Dropout& dropout) {
  bool folds = g.len_q == 1 && g.group() > 1 && g.query_heads == g.heads &&
               !Op::ScoreType::has_table && !Op::ReadoutType::uses_own_rows && mask.slopes.empty() &&
               dropout.rate == 0;
  if (!folds) return false;
  for_each_param(op, [&](const char*, const auto& param) { folds = folds && param.size() <= 1; });
  for (Index b = 0; b < g.batch; ++b) folds = folds && bound.keys_of(b, 0).begin == 0;
  return folds;
}

[[nodiscard]] inline Geometry fold_heads(Geometry g) {
  g.len_q = g.group();
  g.heads = g.query_heads = g.kv_heads;
  return g;
}

// The heads of `view` as rows; a view that serves all heads stays.
template <class U>
[[nodiscard]] TensorView<U> fold_heads(const TensorView<U>& view, const Geometry& g) {
  const Shape& s = view.shape();
  if (!view.given() || s.heads != g.heads) return view;
  const Strides& strides = view.strides();
  return {view.data(), {s.batch, g.kv_heads, g.group(), s.dim},
          {strides.batch, g.group() * strides.head, strides.head}};
}

// What hides keys from the one query, now from each of its group.
template <class Real>
[[nodiscard]] Mask<Real> fold_heads(Mask<Real> mask, const BoundMask<Real>& bound, const Geometry& g) {
  mask.bands.clear();
  mask.key_lengths.clear();
  for (Index b = 0; b < g.batch; ++b) mask.key_lengths.push_back(bound.keys_of(b, 0).end);
  mask.allowed = fold_heads(mask.allowed, g);
  mask.bias = fold_heads(mask.bias, g);
  std::vector<Index> documents;
  for (const Index document : mask.query_documents)
    documents.insert(documents.end(), std::size_t(g.group()), document);
  mask.query_documents = std::move(documents);
  return mask;
}

}  // namespace heed::inline HEED_ABI::detail
