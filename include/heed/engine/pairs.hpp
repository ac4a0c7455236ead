// SPDX-License-Identifier: Apache-2.0
#pragma once

// Builds the Pairs that score() sees, one vector of them at a time: of several queries with one key (LanePairs), or
// of one query with several keys (RowPairs). Both are values, so that a loop over keys keeps in registers what does
// not change.

#include <heed/engine/relative_rows.hpp>
#include <heed/engine/tiles.hpp>
#include <heed/plug/score.hpp>
#include <heed/simd/few_products.hpp>
#include <heed/simd/functions.hpp>

#include <algorithm>
#include <array>
#include <limits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Sets the dot and the logit of a pair from its scaled dot product.
template <class Score, class Real>
[[gnu::always_inline]] inline void set_logits(const LogitFactors<Real>& c, Pack<Real> scaled_dot,
                                              PairOf<Score, Pack<Real>>& pair) {
  pair.logit = scaled_dot;
  pair.dot = scaled_dot * c.dot;
  if (c.dots_are_logits) [[likely]]
    return;
  pair.logit = pair.logit * c.keep;
  if (c.cap != Real(0)) pair.logit = c.cap * math::tanh(pair.logit * c.inverse_cap);
}

// What stands before a soft cap: of logit = cap tanh(x / cap), dx = dlogit (1 - (logit / cap)^2); x. and logit. likewise.
template <class Real, class S>
[[nodiscard, gnu::always_inline]] inline S before_cap(const LogitFactors<Real>& c, const S& logit,
                                                      const S& dlogit) {
  if (c.cap == Real(0)) [[likely]]
    return dlogit;
  const S saturation = logit / S(Pack<Real>(c.cap));
  return dlogit * (math::constant<S>(1) - saturation * saturation);
}

// Query features as pairs have them.
template <class Score, class Real, std::size_t n>
void move_factor(const LogitFactors<Real>& c, std::array<Pack<Real>, n>& query) {
  if constexpr (normed_dots<Score>) {
    constexpr Real largest = std::numeric_limits<Real>::max();
    // The feature of a row of zeros may overflow, and 0 times infinity is no number.
    query[0] = max(Pack<Real>(-largest), min(Pack<Real>(largest), query[0] * c.feature));
  }
}

}  // namespace detail

// p[0], p[1], ... in every lane.
template <class Score, class Real>
[[nodiscard]] ScalarsOf<Score, Pack<Real>> scalars_in_lanes(const Real* scalars) {
  ScalarsOf<Score, Pack<Real>> p;
  for (std::size_t i = 0; i < p.size(); ++i) p[i] = Pack<Real>(scalars[i]);
  return p;
}

// Pairs of the queries in vector v of a panel with one key of the tile after the other.
template <class Score, class Real>
class LanePairs {
 public:
  LanePairs(const ScoreTile<Real>& t, int v)
      : v_(v),
        logits_(t.logits),
        projected_(t.projected),
        table_(t.table),
        positions_(t.positions),
        head_(t.place->head),
        first_row_(t.place->query + v * kLanes<Real>),
        first_key_(t.place->key),
        first_query_(t.first_query + v * kLanes<Real>),
        query_position_(Pack<Real>::iota() + Real(first_query_)),
        key_position_(Real(first_key_)) {
    for (std::size_t i = 0; i < key_.size(); ++i)
      key_[i] = t.key_features + Index(i) * t.key_stride;
    for (std::size_t i = 0; i < query_.size(); ++i) query_[i] = t.features.load(Index(i), v);
    detail::move_factor<Score>(logits_, query_);
  }

  // Key j of the tile.
  [[nodiscard, gnu::always_inline]] PairOf<Score, Pack<Real>> operator()(
      Index j, Pack<Real> scaled_dot) const {
    PairOf<Score, Pack<Real>> pair;
    detail::set_logits<Score>(logits_, scaled_dot, pair);
    if constexpr (Score::has_projection)
      if (projected_.data) pair.projected = projected_.load(j, v_);
    for (std::size_t i = 0; i < pair.key.size(); ++i) pair.key[i] = Pack<Real>(key_[i][j]);
    // One by one: GCC copies an array in halves of a vector, which then cannot be loaded as a whole.
    for (std::size_t i = 0; i < query_.size(); ++i) pair.query[i] = query_[i];
    if constexpr (table_by_distance<Score>)
      pair.table = table_.load(place_of(j), v_);
    else if constexpr (Score::has_table)
      pair.table = table_.load(Index(key_[0][j]), v_);
    if constexpr (Score::has_positions)
      pair.position = positions_->template of_queries<buckets_by_distance<Score>>(head_, first_row_,
                                                                                  first_key_ + j);
    pair.query_index = query_position_;
    pair.key_index = key_position_ + Real(j);
    return pair;
  }
  [[nodiscard]] const auto& query() const { return query_; }
  // The row of by_lane that key j reads of a table by distance.
  [[nodiscard, gnu::always_inline]] Index place_of(Index j) const {
    return relative_place<Real>(clip_of<Real>(table_.rows), first_query_ - first_key_ - j);
  }

 private:
  int v_;
  LogitFactors<Real> logits_;
  LaneTile<Real> projected_, table_;
  const PositionTable<Real>* positions_;
  Index head_, first_row_, first_key_;
  Index first_query_;  // position of lane 0
  Pack<Real> query_position_;
  Real key_position_;
  std::array<const Real*, std::size_t(Score::key_features)> key_;
  std::array<Pack<Real>, std::size_t(Score::query_features)> query_;
};

// Pairs of one query with W keys at a time.
template <class Score, class Real>
class RowPairs {
 public:
  explicit RowPairs(const ScoreRow<Real>& r)
      : count_(r.place->keys),
        logits_(r.logits),
        projected_(r.projected),
        table_(r.table),
        positions_(r.positions),
        lane_(r.lane),
        head_(r.place->head),
        row_(r.place->query + r.lane),
        first_key_(r.place->key),
        position_(r.query_position),
        query_position_(Real(r.query_position)),
        key_position_(Real(r.place->key)) {
    for (std::size_t i = 0; i < key_.size(); ++i)
      key_[i] = r.key_features + Index(i) * r.key_stride;
    for (std::size_t i = 0; i < query_.size(); ++i)
      query_[i] = Pack<Real>(r.features.row(Index(i))[lane_]);
    detail::move_factor<Score>(logits_, query_);
  }

  // Keys j ... j + W - 1 of the tile; those behind the last one have derived values of 0.
  [[nodiscard, gnu::always_inline]] PairOf<Score, Pack<Real>> operator()(
      Index j, Pack<Real> scaled_dot) const {
    PairOf<Score, Pack<Real>> pair;
    detail::set_logits<Score>(logits_, scaled_dot, pair);
    if constexpr (Score::has_projection)
      if (projected_) pair.projected = Pack<Real>::load(projected_ + j);
    const Index left = count_ - j;
    for (std::size_t i = 0; i < pair.key.size(); ++i)
      pair.key[i] =
          left >= kLanes<Real> ? Pack<Real>::load(key_[i] + j) : load_part<Real>(key_[i] + j, left);
    for (std::size_t i = 0; i < query_.size(); ++i) pair.query[i] = query_[i];
    if constexpr (table_by_distance<Score>) {
      const Index clip = table_.rows / 2;
      for (int k = 0; k < kLanes<Real>; ++k)
        pair.table.v[k] =
            table_.row(std::clamp(position_ - first_key_ - j - k, -clip, clip) + clip)[lane_];
    } else if constexpr (Score::has_table) {
      for (int k = 0; k < kLanes<Real>; ++k)
        pair.table.v[k] = table_.row(Index(pair.key[0].v[k]))[lane_];
    }
    if constexpr (Score::has_positions)
      pair.position =
          positions_->template of_keys<buckets_by_distance<Score>>(head_, row_, first_key_ + j);
    pair.query_index = query_position_;
    pair.key_index = Pack<Real>::iota() + (key_position_ + Real(j));
    return pair;
  }

 private:
  Index count_;
  LogitFactors<Real> logits_;
  const Real* projected_;
  LaneTile<Real> table_;
  const PositionTable<Real>* positions_;
  Index lane_, head_, row_, first_key_, position_;
  Pack<Real> query_position_;
  Real key_position_;
  std::array<const Real*, std::size_t(Score::key_features)> key_;
  std::array<Pack<Real>, std::size_t(Score::query_features)> query_;
};

}  // namespace HEED_ABI
}  // namespace heed
