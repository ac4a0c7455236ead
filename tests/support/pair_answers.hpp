// SPDX-License-Identifier: Apache-2.0
#pragma once

// Compares a bound mask's answers about pairs, rows and tiles with a plain function.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/mask/bound_mask.hpp>

#include <algorithm>
#include <functional>

namespace heed_test {

// Returns whether pair (i, j) of batch b and head h is visible; i is the query's index.
using Shows = std::function<bool(heed::Index b, heed::Index h, heed::Index i, heed::Index j)>;

// Compares every pair, every row, and 200 tiles.
template <class Real>
void check_pairs(const heed::Mask<Real>& mask, const heed::Geometry& g, const Shows& shows) {
  using heed::Index, heed::TileKind;
  const heed::BoundMask<Real> bound(mask, g, "test", 2);
  Index wrong = 0, wrong_rows = 0;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) {
        Index seen = 0;
        for (Index j = 0; j < g.len_kv; ++j) {
          wrong += bound.visible(b, h, i, j) != shows(b, h, i, j);
          seen += shows(b, h, i, j);
        }
        wrong_rows += bound.sees_any(b, h, i) != (seen > 0) || bound.count_visible(b, h, i) != seen;
      }
  CHECK(wrong == 0);
  CHECK(wrong_rows == 0);
  heed::RandomSequence random(3);
  for (int n = 0; n < 200; ++n) {
    const Index b = random.below(g.batch), h = random.below(g.heads), i = random.below(g.len_q),
                j = random.below(g.len_kv);
    const Index rows = 1 + random.below(std::min<Index>(20, g.len_q - i)),
                keys = 1 + random.below(g.len_kv - j);
    Index seen = 0;
    for (Index r = i; r < i + rows; ++r)
      for (Index k = j; k < j + keys; ++k) seen += shows(b, h, r, k);
    const TileKind kind = bound.classify(b, h, i, rows, j, keys);
    if (kind == TileKind::empty) CHECK(seen == 0);
    if (kind == TileKind::full) CHECK(seen == rows * keys);
  }
}

}  // namespace heed_test
