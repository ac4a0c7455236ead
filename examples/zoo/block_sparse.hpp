// SPDX-License-Identifier: Apache-2.0
#pragma once

// Block-sparse attention with the fixed pattern of Sparse Transformers: a query sees its own span
// of keys, and the last block of every other span, which is meant to sum that span up.
//
//   (i, j) is visible where floor(i / 256) = floor(j / 256), or j mod 256 >= 192
//
// Blocks of 64 keys are hidden as a whole, so that they cost nothing. Sequences of up to 256 tokens see all.
//
// Source  R. Child et al., Generating Long Sequences with Sparse Transformers (2019), section 4.3, causal there, with spans of
//         128 tokens and sums of 8 to 32. Here only the mask of the call hides later keys.

#include "kit.hpp"

#include <heed/mask/patterns.hpp>

namespace zoo::block_sparse {

template <class T>
using Op = heed::ScaledDot<T>;

template <class T>
heed::Mask<T> mask(const heed::Geometry&) {
  return heed::visible<T>(
      [](auto, auto, auto i, auto j) { return (i / 256 == j / 256) | (j % 256 >= 192); },
      heed::Align::bottom_right);
}

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:block-sparse", "spans of 256, sums of 64", g, {}, {}, mask<T>};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const PlainRow seen = row.seeing([&](std::ptrdiff_t j) {
    const std::ptrdiff_t span = j - j % 256;
    const bool own = row.position >= span && row.position < span + 256;
    return own || j >= span + 256 - 64;
  });
  return mixed(seen, softmax(logits(seen)));
}

}  // namespace zoo::block_sparse
