// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exponentials of one score map of a difference (ops/differential.hpp), e_j = exp(S_j - max S), for one vector
// of queries. 2^(x log2(e)) costs less than exp(x); its error grows with the spread of the row's scores.

#include <heed/plug/row_kit.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

inline constexpr Index kDifferenceBlock = 64;  // terms of a partial sum

// Sets lse of the map, from sum = sum_j e_j; log(0) = -infinity.
template <class Real>
inline void store_map_lse(const RowBlock<Real>& block, std::size_t map, int v, Pack<Real> sum) {
  const Pack<Real> lse = row_top(block, map, v) + math::log(sum);
  lse.store(block.lse[map] + v * kLanes<Real>);
}

template <class Real>
[[nodiscard]] inline Pack<Real> map_exponential(Pack<Real> score, Pack<Real> top) {
  return exp2_weight((score - top) * Real(kLog2e));
}

// Turns scores of the map into e, 0 where hidden; returns the sum of e.
template <class Real>
[[nodiscard]] inline Pack<Real> exponentiate_map(const RowBlock<Real>& block, std::size_t map,
                                                 int v) {
  using P = Pack<Real>;
  const LaneTile<Real>& scores = block.scores[map];
  const P top = row_top(block, map, v);
  return fold_over_keys<Real, P, kDifferenceBlock>(scores.rows, [&](P& sum, Index j) {
    const P e = map_exponential(scores.load(j, v), top);
    scores.store(j, v, e);
    sum += e;
  });
}

inline constexpr int kHiddenKey = -1;  // stands in place of an exponential, which is never negative

// Writes e into dscores[map], kHiddenKey where hidden; returns the sums of e and of e X, X = dL/dweights.
template <class Real>
[[nodiscard]] inline PackPair<Real> exponentiate_map_with(const RowBlock<Real>& block,
                                                          std::size_t map, int v) {
  using P = Pack<Real>;
  const LaneTile<Real>&scores = block.scores[map], &out = block.dscores[map];
  const P top = row_top(block, map, v);
  return fold_over_keys<Real, PackPair<Real>, kDifferenceBlock>(
      scores.rows, [&](PackPair<Real>& sums, Index j) {
        const P score = scores.load(j, v), e = map_exponential(score, top);
        const auto hidden = is_hidden(score);
        out.store(j, v, select(hidden, P(kHiddenKey), e));
        sums.first += e;
        sums.second =
            select(hidden, sums.second, mul_add(e, block.dweights.load(j, v), sums.second));
      });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
