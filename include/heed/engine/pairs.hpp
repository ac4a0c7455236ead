// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a score reads of query-key pairs, a vector of them at a time: queries along the lanes (LanePairs), or
// keys (RowPairs). Values of their own, so that a loop over keys keeps what is constant in registers.
// Scaled: the call has a scale other than 0 and no soft cap.

#include <heed/engine/context.hpp>
#include <heed/engine/mask_tile.hpp>

namespace heed::inline HEED_ABI {

template <class Op, class T>
class QuerySide;

namespace detail {

// From scaled dot products to a pair's dot and logit.
template <class Op, class T, bool Scaled>
struct Logits {
  T inverse, keep, cap;
  explicit Logits(const CallContext<Op, T>& c)
      : inverse(T(1) / c.query_factor()),
        keep(c.scale == T(0) ? T(0) : T(1)),
        cap(c.mask.soft_cap()) {}
  [[gnu::always_inline]] void set(Pack<T> scaled_dot,
                                  PairOf<typename Op::ScoreType, Pack<T>>& pair) const {
    pair.logit = scaled_dot;
    pair.dot = scaled_dot * inverse;
    if constexpr (!Scaled) {
      pair.logit = pair.logit * keep;
      if (cap != T(0)) pair.logit = cap * math::tanh(pair.logit * (T(1) / cap));
    }
  }
};

// Features and position of the first key of a tile.
template <class Op, class T>
struct KeysOfTile {
  std::array<const T*, std::size_t(Op::ScoreType::key_features)> feature;
  T position;
  KeysOfTile(const QuerySide<Op, T>& side, const TilePlace& place) : position(T(place.key)) {
    for (std::size_t i = 0; i < feature.size(); ++i)
      feature[i] = side.context().keys.feature(place.batch, place.head, side.map(), int(i), place.key);
  }
};

}  // namespace detail

// Pairs of the queries in vector `v` of a panel with one key after the other. `projected`: their projected
// dot products.
template <class Op, class T, bool Scaled>
class LanePairs {
 public:
  using Score = typename Op::ScoreType;

  LanePairs(const QuerySide<Op, T>& side, const TilePlace& place, int v,
            const LaneTile<T>& projected)
      : v_(v),
        keys_(side, place),
        logits_(side.context()),
        projected_(side.side().projected.rows > 0 ? projected : LaneTile<T>{}),
        table_(side.side().table),
        query_position_(Pack<T>::iota() + T(place.query + v * kLanes<T>)) {
    for (std::size_t i = 0; i < query_.size(); ++i) query_[i] = side.features().load(Index(i), v);
  }

  // Key j of the tile.
  [[nodiscard, gnu::always_inline]] PairOf<Score, Pack<T>> operator()(Index j,
                                                                      Pack<T> scaled_dot) const {
    PairOf<Score, Pack<T>> pair;
    logits_.set(scaled_dot, pair);
    if constexpr (Score::has_projection)
      if (projected_.data) pair.projected = projected_.load(j, v_);
    for (std::size_t i = 0; i < pair.key.size(); ++i) pair.key[i] = Pack<T>(keys_.feature[i][j]);
    // One by one: GCC copies an array in halves of a vector, which then cannot be loaded as a whole.
    for (std::size_t i = 0; i < query_.size(); ++i) pair.query[i] = query_[i];
    if constexpr (Score::has_table) pair.table = table_.load(Index(keys_.feature[0][j]), v_);
    pair.query_index = query_position_;
    pair.key_index = keys_.position + T(j);
    return pair;
  }
  [[nodiscard]] const auto& query() const { return query_; }

 private:
  int v_;
  detail::KeysOfTile<Op, T> keys_;
  detail::Logits<Op, T, Scaled> logits_;
  LaneTile<T> projected_, table_;
  Pack<T> query_position_;
  std::array<Pack<T>, std::size_t(Score::query_features)> query_;
};

// Pairs of query `lane` of a panel with W keys at a time. `projected`: a row of its projected dot products.
template <class Op, class T, bool Scaled>
class RowPairs {
 public:
  using Score = typename Op::ScoreType;

  RowPairs(const QuerySide<Op, T>& side, const TilePlace& place, Index lane, const T* projected)
      : keys_(side, place),
        count_(place.keys),
        logits_(side.context()),
        projected_(side.side().projected.rows > 0 ? projected : nullptr),
        table_(side.side().table),
        lane_(lane),
        query_position_(T(place.query + lane)) {
    for (std::size_t i = 0; i < query_.size(); ++i)
      query_[i] = Pack<T>(side.features().row(Index(i))[lane]);
  }

  // Keys j ... j + W - 1 of the tile; those behind the last one have side values of 0.
  [[nodiscard, gnu::always_inline]] PairOf<Score, Pack<T>> operator()(Index j,
                                                                      Pack<T> scaled_dot) const {
    PairOf<Score, Pack<T>> pair;
    logits_.set(scaled_dot, pair);
    if constexpr (Score::has_projection)
      if (projected_) pair.projected = Pack<T>::load(projected_ + j);
    const Index left = count_ - j;
    for (std::size_t i = 0; i < pair.key.size(); ++i)
      pair.key[i] = left >= kLanes<T> ? Pack<T>::load(keys_.feature[i] + j)
                                      : load_part(keys_.feature[i] + j, left);
    for (std::size_t i = 0; i < query_.size(); ++i) pair.query[i] = query_[i];
    if constexpr (Score::has_table)
      for (int k = 0; k < kLanes<T>; ++k)
        pair.table.v[k] = table_.row(Index(pair.key[0].v[k]))[lane_];
    pair.query_index = query_position_;
    pair.key_index = Pack<T>::iota() + (keys_.position + T(j));
    return pair;
  }

 private:
  detail::KeysOfTile<Op, T> keys_;
  Index count_;
  detail::Logits<Op, T, Scaled> logits_;
  const T* projected_;
  LaneTile<T> table_;
  Index lane_;
  Pack<T> query_position_;
  std::array<Pack<T>, std::size_t(Score::query_features)> query_;
};

}  // namespace heed::inline HEED_ABI
