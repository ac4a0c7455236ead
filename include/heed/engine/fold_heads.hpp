// SPDX-License-Identifier: Apache-2.0
#pragma once

// One query per head, as in decoding: the heads that read one key-value head become the queries of one
// head, and share its keys, its values and their lanes.
//
//   (batch, kv_heads * group, 1, dim) -> (batch, kv_heads, group, dim), the same memory

#include <heed/engine/checks.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/plug/token_inputs.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

[[nodiscard]] inline Geometry fold_heads(Geometry g) {
  g.len_q = g.group();
  g.heads = g.query_heads = g.kv_heads;
  return g;
}

// Few queries are bound by memory: products of pairs of bfloat16 would gain nothing.
[[nodiscard]] inline Options fold_heads(Options options) {
  options.precision = {};
  return options;
}

// Does every map read the same columns of the same rows, folded or not?
template <class Real>
[[nodiscard]] bool sources_fold(const OpTiles<Real>& op, const Geometry& g) {
  const Geometry folded = fold_heads(g);
  bool same = true;
  for_each_source(op, g, [&](Index h, int map, const Source& s) {
    const Index kv = g.kv_head(h);
    const Source f = op.normaliser.source(folded, kv, map);
    same = same && s.query_head == h && s.kv_head == kv && f.query_head == kv && f.kv_head == kv &&
           s.query_column == f.query_column && s.key_column == f.key_column && s.width == f.width;
  });
  return same;
}

// Does every part of the op promise to read no place, and has what may differ by head one value for all? Not with ALiBi's
// slopes, dropout or numbers of tokens, which may be those of heads.
template <class Real>
[[nodiscard]] bool no_part_reads_places(const OpTiles<Real>& op, const Geometry& g,
                                        const Mask<Real>& mask, const Dropout& dropout) {
  const auto folds_part = [](const auto& traits) {
    return traits.place_free && traits.one_value_each;
  };
  return g.query_heads == g.heads && !mask.slopes && dropout.rate == 0 &&
         folds_part(op.score.traits) && folds_part(op.normaliser.traits) &&
         folds_part(op.readout.traits) && !op.readout.traits.uses_own_rows && !op.columns.any() &&
         sources_fold(op, g);
}
// May the heads of a group be queries of one head? Not under a window that hides the first keys; nor with functions of positions.
template <class Real>
[[nodiscard]] bool heads_fold(const OpTiles<Real>& op, const Geometry& g, const Mask<Real>& mask,
                              const BoundMask<Real>& bound, const Dropout& dropout) {
  bool folds = g.len_q == 1 && g.group() > 1 && mask.rules.empty() &&
               no_part_reads_places(op, g, mask, dropout);
  for (Index b = 0; folds && b < g.batch; ++b) folds = bound.keys_of(b, 0).begin == 0;
  return folds;
}

// The heads of `view` as rows; a view that serves all heads stays.
template <class U>
[[nodiscard]] TensorView<U> fold_heads(const TensorView<U>& view, const Geometry& g) {
  const Shape& s = view.shape();
  if (!view.given() || s.heads != g.heads) return view;
  const Strides& strides = view.strides();
  return {view.data(),
          {s.batch, g.kv_heads, g.group(), s.dim},
          {strides.batch, g.group() * strides.head, strides.head}};
}

// What hides keys from the one query of a call whose heads fold, now from each of its group. Bands, key lengths and ranges of
// keys are key lengths then; there is nothing else that heads_fold() refuses.
template <class Real>
[[nodiscard]] Mask<Real> fold_heads(const Mask<Real>& mask, const BoundMask<Real>& bound,
                                    const Geometry& g) {
  Mask<Real> folded;
  folded.key_lengths.emplace();
  for (Index b = 0; b < g.batch; ++b) folded.key_lengths->push_back(bound.keys_of(b, 0).end);
  folded.allowed = fold_heads(mask.allowed, g);
  folded.bias = fold_heads(mask.bias, g);
  folded.soft_cap = mask.soft_cap;
  if (!mask.query_documents) return folded;
  folded.query_documents.emplace();
  for (const Index document : *mask.query_documents)
    folded.query_documents->insert(folded.query_documents->end(), std::size_t(g.group()), document);
  folded.key_documents = mask.key_documents;
  return folded;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
