// SPDX-License-Identifier: Apache-2.0
#pragma once

// Learnt tables of positions (has_positions in plug/score.hpp): their entries laid out so that a vector of queries reads
// those of a key at once, and the way of their gradients back. i and j are rows of queries and keys; the position of a query,
// which bucket() is asked about, is geometry.query_position(i).
//
//   by distance   values[head][i - j]: queries i, i + 1, ... and key j read neighbours, and add to neighbours
//   by pair       buckets[i][j], the same for all heads: a look-up per pair
//
// Memory  by distance len_q + len_kv numbers per head; by pair len_q len_kv 32-bit numbers per call. Gradients: as many
//         numbers as a head has distances, or entries, per worker.

#include <heed/core/error.hpp>
#include <heed/core/geometry.hpp>
#include <heed/plug/score.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Score, class Real>
class PositionTable {
 public:
  static constexpr bool kByDistance = buckets_by_distance<Score>;

  // Throws std::invalid_argument where the table does not fit the heads, or bucket() leaves it.
  PositionTable(const Score& score, const Geometry& g) : score_(score), g_(g) {
    const Param<Real>& table = score.*Score::positions;
    require_positions(score, g, "heed");
    if constexpr (kByDistance) {
      for (Index n = 0; n < line(); ++n) {
        const Index i_minus_j = distance(n), i = std::max<Index>(i_minus_j, 0);
        buckets_.push_back(std::int32_t(bucket_of(score, g.query_position(i), i - i_minus_j)));
      }
      for (Index h = 0; h < g.heads; ++h)
        for (const std::int32_t bucket : buckets_)
          values_.push_back(table[position_row(table, h) + bucket]);
    } else {
      for (Index i = g.share.queries_before; i < g.held_queries_end(); ++i)
        for (Index j = g.share.keys_before; j < g.held_keys_end(); ++j)
          buckets_.push_back(std::int32_t(bucket_of(score, g.query_position(i), j)));
    }
  }

  // The entries of queries i, i + 1, ... and key j; those beyond the last query mean nothing.
  [[nodiscard, gnu::always_inline]] Pack<Real> of_queries(Index h, Index i, Index j) const {
    if constexpr (kByDistance) {
      return Pack<Real>::load(values_.data() + h * line() + place(i - j));
    } else {
      const Real* values = row(h);
      Pack<Real> entries;
      for (Index k = 0; k < kLanes<Real>; ++k) entries.v[k] = values[bucket(i + k, j)];
      return entries;
    }
  }
  // The entries of query i and keys j, j + 1, ...; those beyond the last key mean nothing.
  [[nodiscard]] Pack<Real> of_keys(Index h, Index i, Index j) const {
    const Real* values = kByDistance ? values_.data() + h * line() : row(h);
    Pack<Real> entries;
    for (Index k = 0; k < kLanes<Real>; ++k)
      entries.v[k] = values[kByDistance ? place(i - j - k) : bucket(i, j + k)];
    return entries;
  }

 private:
  template <class S, class U>
  friend class PositionSums;
  // Vectors reach so far beyond the last query and the last key.
  static constexpr Index kBeyond = kPanelLanes<Real>;

  // Differences -(len_kv - 1) ... len_q - 1 of rows, and what vectors reach beside them.
  [[nodiscard]] Index line() const { return g_.len_q + g_.len_kv + 2 * kBeyond; }
  [[nodiscard]] Index place(Index distance) const { return distance + g_.len_kv + kBeyond; }
  // The difference of place n, or the next one that a pair has.
  [[nodiscard]] Index distance(Index n) const {
    return std::clamp<Index>(n - g_.len_kv - kBeyond, std::min<Index>(0, 1 - g_.len_kv),
                             std::max<Index>(0, g_.len_q - 1));
  }
  [[nodiscard]] Index bucket(Index i, Index j) const {
    const Index row = std::min(i, g_.held_queries_end() - 1) - g_.share.queries_before,
                column = std::min(j, g_.held_keys_end() - 1) - g_.share.keys_before;
    return buckets_[std::size_t(row * g_.held_keys() + column)];
  }
  [[nodiscard]] const Real* row(Index h) const {
    const Param<Real>& table = score_.*Score::positions;
    return table.data() + position_row(table, h);
  }

  const Score& score_;
  Geometry g_;
  std::vector<std::int32_t> buckets_;  // [place of a distance], or [query][key] of those at hand
  std::vector<Real> values_;           // by distance: [head][place]
};

// What a worker adds up of the gradient of one head's entries.
template <class Score, class Real>
class PositionSums {
 public:
  using Table = PositionTable<Score, Real>;
  static constexpr bool kByDistance = Table::kByDistance;

  PositionSums(const Table& table, Scratch<Real>& scratch)
      : table_(table), line_(scratch.take(kByDistance ? table.line() : 0)) {
    sums_.resize(std::size_t((table.score_.*Score::positions).extent(1)));
  }

  void begin() {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    if (kByDistance) std::fill(line_, line_ + table_.line(), Real(0));
  }
  // dL/dentry of queries i, i + 1, ... and key j; 0 beyond the last query.
  [[gnu::always_inline]] void add(Index i, Index j, Pack<Real> g) {
    if constexpr (kByDistance) {
      Real* cell = line_ + table_.place(i - j);
      (Pack<Real>::load(cell) + g).store(cell);
    } else {
      for (Index k = 0; k < kLanes<Real>; ++k)
        sums_[std::size_t(table_.bucket(i + k, j))] += double(g.v[k]);
    }
  }
  // Adds the sums to head h's entries in `grad`.
  void finish(Score& grad, Index h) {
    if constexpr (kByDistance)
      for (Index n = 0; n < table_.line(); ++n)
        sums_[std::size_t(table_.buckets_[std::size_t(n)])] += double(line_[n]);
    Param<Real>& to = grad.*Score::positions;
    const Index first = position_row(to, h);
    for (std::size_t n = 0; n < sums_.size(); ++n) to[first + Index(n)] += Real(sums_[n]);
  }

 private:
  const Table& table_;
  Real* line_;                // [place of a distance]
  std::vector<double> sums_;  // [entry]
};

// Of a score without such a table.
struct NoPositions {
  template <class... Any>
  explicit NoPositions(const Any&...) {}
  void begin() const {}
  template <class Score>
  void finish(Score&, Index) const {}
};
template <class Score, class Real>
using PositionTableOf = typename std::conditional_t<Score::has_positions,
                                                    std::type_identity<PositionTable<Score, Real>>,
                                                    std::type_identity<NoPositions>>::type;
template <class Score, class Real>
using PositionSumsOf =
    typename std::conditional_t<Score::has_positions, std::type_identity<PositionSums<Score, Real>>,
                                std::type_identity<NoPositions>>::type;

}  // namespace HEED_ABI
}  // namespace heed
