// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prefix-LM: all queries see the keys of a prefix; queries behind it also see the keys before themselves.
//
//   (i, j) is visible where j <= i or j < n       n: length of the prefix
//
// Under a causal mask it is plain attention. A language model with it is trained only on the tokens behind the prefix.
//
// Source  C. Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020),
//         section 3.2.1. There each text has a prefix of its own; here it is a quarter of the keys.

#include "kit.hpp"

#include <heed/mask/patterns.hpp>

namespace zoo::prefix_lm {

template <class T>
using Op = heed::ScaledDot<T>;

template <class T>
heed::Mask<T> mask(const heed::Geometry& g) {
  return heed::prefix_lm<T>({g.len_kv / 4}, heed::Align::bottom_right);
}

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:prefix-lm", "a prefix of a quarter", g, {}, {.reads_later_keys = true}, mask<T>};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const PlainRow seen =
      row.seeing([&](std::ptrdiff_t j) { return j <= row.position || j < row.all_keys / 4; });
  return mixed(seen, softmax(logits(seen)));
}

}  // namespace zoo::prefix_lm
