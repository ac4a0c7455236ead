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

#include <heed/core/geometry.hpp>
#include <heed/plug/score.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class PositionTable {
 public:
  // The table of a score that has none.
  PositionTable() = default;
  // bucket_of(i, j): the entry that position i of a query and position j of a key read; by_distance: it asks for i - j alone.
  // `table` must outlive this.
  template <class BucketOf>
  PositionTable(const Param<Real>& table, const Geometry& g, bool by_distance,
                const BucketOf& bucket_of)
      : g_(g), entries_(table.extent(1)), by_distance_(by_distance) {
    for (Index h = 0; h < g.heads; ++h) rows_.push_back(table.data() + position_row(table, h));
    if (by_distance) {
      for (Index n = 0; n < line(); ++n) {
        const Index i_minus_j = distance(n), i = std::max<Index>(i_minus_j, 0);
        buckets_.push_back(std::int32_t(bucket_of(g.query_position(i), i - i_minus_j)));
      }
      for (const Real* row : rows_)
        for (const std::int32_t bucket : buckets_) values_.push_back(row[bucket]);
    } else {
      for (Index i = g.share.queries_before; i < g.held_queries_end(); ++i)
        for (Index j = g.share.keys_before; j < g.held_keys_end(); ++j)
          buckets_.push_back(std::int32_t(bucket_of(g.query_position(i), j)));
    }
  }

  // Entries of a head.
  [[nodiscard]] Index entries() const { return entries_; }

  // The entries of queries i, i + 1, ... and key j; those beyond the last query mean nothing.
  template <bool by_distance>
  [[nodiscard, gnu::always_inline]] Pack<Real> of_queries(Index h, Index i, Index j) const {
    if constexpr (by_distance) {
      return Pack<Real>::load(values_.data() + h * line() + place(i - j));
    } else {
      const Real* values = rows_[std::size_t(h)];
      Pack<Real> entries;
      for (Index k = 0; k < kLanes<Real>; ++k) entries.v[k] = values[bucket(i + k, j)];
      return entries;
    }
  }
  // The entries of query i and keys j, j + 1, ...; those beyond the last key mean nothing.
  template <bool by_distance>
  [[nodiscard]] Pack<Real> of_keys(Index h, Index i, Index j) const {
    const Real* values = by_distance ? values_.data() + h * line() : rows_[std::size_t(h)];
    Pack<Real> entries;
    for (Index k = 0; k < kLanes<Real>; ++k)
      entries.v[k] = values[by_distance ? place(i - j - k) : bucket(i, j + k)];
    return entries;
  }

 private:
  template <class Number>
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

  Geometry g_;
  Index entries_ = 0;
  bool by_distance_ = false;
  std::vector<const Real*> rows_;      // [head], of the score's table
  std::vector<std::int32_t> buckets_;  // [place of a distance], or [query][key] of those at hand
  std::vector<Real> values_;           // by distance: [head][place]
};

// What a worker adds up of the gradient of one head's entries.
template <class Real>
class PositionSums {
 public:
  PositionSums(const PositionTable<Real>& table, Scratch<Real>& scratch)
      : table_(table),
        line_(scratch.take(table.by_distance_ ? table.line() : 0)),
        sums_(std::size_t(table.entries())) {}

  void begin() {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    if (table_.by_distance_) std::fill(line_, line_ + table_.line(), Real(0));
  }
  // Adds dL/dentry of queries i, i + 1, ... and key j; 0 beyond the last query.
  template <bool by_distance>
  [[gnu::always_inline]] void add(Index i, Index j, Pack<Real> g) {
    if constexpr (by_distance) {
      Real* cell = line_ + table_.place(i - j);
      (Pack<Real>::load(cell) + g).store(cell);
    } else {
      for (Index k = 0; k < kLanes<Real>; ++k)
        sums_[std::size_t(table_.bucket(i + k, j))] += double(g.v[k]);
    }
  }
  // The sums of all entries, once all pairs have added to them.
  [[nodiscard]] const std::vector<double>& finish() {
    if (table_.by_distance_)
      for (Index n = 0; n < table_.line(); ++n)
        sums_[std::size_t(table_.buckets_[std::size_t(n)])] += double(line_[n]);
    return sums_;
  }

 private:
  const PositionTable<Real>& table_;
  Real* line_;                // [place of a distance]
  std::vector<double> sums_;  // [entry]
};

}  // namespace HEED_ABI
}  // namespace heed
