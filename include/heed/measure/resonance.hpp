// SPDX-License-Identifier: Apache-2.0
#pragma once

// What adaptive resonance does to a pair of query and key tensors, made visible.
//
//   resonance_map         r_ij of every pair, 0 where the mask hides it
//   resonance_statistics  per head: the share of visible pairs that cross the vigilance,
//                         Pr[c' > rho], and the mean of r; without a (len_q, len_kv) matrix
//
// Shapes   query (batch, heads, len_q, dim_qk), key (batch, kv_heads, len_kv, dim_qk),
//          map (batch, heads, len_q, len_kv)
// Bounds   finite for finite rows of any size. c' = c, or (c + 1)/2 for the centred gate: the number
//          that the gate compares with rho. For the static gate, and no other, the pairs that cross
//          are those of r > 1/2 (ops/dar/gate.hpp).
//          The statistics have the same bits for any number of threads.
// Errors   std::invalid_argument on sizes that do not fit.
// Source   "Attention with Differentiable Adaptive Resonance", section 9.
// Cost     one product Q K^T and one gate a pair.

#include <heed/core/parallel.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/ops/dar.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/scratch.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// One entry per head, over all batches; 0 for a head without a visible pair.
struct ResonanceStatistics {
  std::vector<double> crossing, mean_resonance;
  std::vector<Index> visible_pairs;
};

namespace detail {

// A tile of pairs, [keys][queries] with kLanes queries a row.
template <class Real>
struct ResonanceTile {
  static constexpr Index kLanes = kPanelLanes<Real>;
  Index batch = 0, head = 0;
  Index query = 0, queries = 0, key = 0, keys = 0;
  bool all_visible = false;
  const Real *resonance = nullptr, *input = nullptr;  // r and c'

  // f(query, key, r, c') for each visible pair, queries inside, keys outside.
  template <class F>
  void for_each_visible(const BoundMask<Real>& mask, F&& f) const {
    for (Index j = 0; j < keys; ++j)
      for (Index i = 0; i < queries; ++i)
        if (all_visible || mask.visible(batch, head, query + i, key + j))
          f(query + i, key + j, resonance[j * kLanes + i], input[j * kLanes + i]);
  }
};

// Resonance of one block of queries against all keys, tile by tile.
template <class Real>
class ResonanceBlock {
 public:
  static constexpr Index kQueries = kPanelLanes<Real>;

  ResonanceBlock(const DarScore<Real>& score, const TensorView<const Real>& query,
                 const TensorView<const Real>& key, const Geometry& g, const BoundMask<Real>& mask)
      : score_(score), query_(query), key_(key), g_(g), mask_(mask) {
    take_tiles();  // counts
    scratch_ = Scratch<Real>(scratch_.used());
    take_tiles();
  }

  // visit(ResonanceTile) for each tile of queries [first, first + kQueries) and keys, but those in
  // which every pair is hidden.
  template <class Visit>
  void run(Index b, Index h, Index first, Visit&& visit) {
    const Index rows = std::min(kQueries, g_.len_q - first);
    load(q_, query_, b, h, first, rows);
    normalise_queries();
    const KeyRange keys = mask_.keys_of_rows(b, first, rows);
    for (Index j = keys.begin; j < keys.end; j += kKeys) {
      const Index count = std::min(kKeys, keys.end - j);
      const TileKind kind = mask_.classify(b, h, first, rows, j, count);
      if (kind == TileKind::empty) continue;
      load(k_, key_, b, g_.kv_head(h), j, count);
      fill_tile(h, count);
      visit(ResonanceTile<Real>{b, h, first, rows, j, count,
                                kind == TileKind::full && !mask_.has_bias(), resonance_.data,
                                input_.data});
    }
  }

 private:
  using P = Pack<Real>;
  static constexpr Index kKeys = kQueries;  // keys lie in lanes, too, when their norms are taken

  struct RowTiles {
    LaneTile<Real> x, projected;
    Index stride = 0;
    const Real* rows = nullptr;
    [[nodiscard]] LaneRow<Real> row(int v) const {
      return {x.constant(), projected.constant(), {}, v};
    }
  };

  [[nodiscard]] Index rank() const {
    return score_.projection().given() ? score_.projection().extent(1) : 0;
  }
  void take_tiles() {
    for (RowTiles* rows : {&q_, &k_}) {
      rows->x = take_tile(g_.dim_qk);
      rows->projected = take_tile(rank());
    }
    for (LaneTile<Real>* tile : {&dots_, &projected_dots_, &resonance_, &input_})
      *tile = take_tile(kKeys);
  }
  [[nodiscard]] LaneTile<Real> take_tile(Index rows) {
    return {scratch_.take(rows * kQueries), rows, kQueries};
  }

  void load(RowTiles& tiles, const TensorView<const Real>& from, Index b, Index head, Index first,
            Index count) const {
    tiles.rows = from.row(b, head, first);
    tiles.stride = from.strides().row;
    pack_lanes(tiles.rows, tiles.stride, count, g_.dim_qk, tiles.x.data, kQueries);
    if (rank() > 0)
      panel_gemm<Store::overwrite>(rank(), g_.dim_qk, kPanelVectors,
                                   Broadcast<Real>{score_.projection().data(), 1, rank()},
                                   tiles.x.data, kQueries, tiles.projected.data, kQueries);
  }

  // The rows that enter the cosine are multiplied by their n here: the dot products of large ones may overflow.
  void normalise_queries() {
    const LaneTile<Real>& rows = rank() > 0 ? q_.projected : q_.x;
    for (int v = 0; v < kPanelVectors; ++v) {
      std::array<P, 2>& features = query_features_[v];
      score_.query_features_of(q_.row(v), features.data());
      for (Index c = 0; c < rows.rows; ++c) rows.store(c, v, rows.load(c, v) * features[0]);
      features[0] = P(Real(1));
    }
  }

  // r and c' of the first `count` keys in k_ against the queries in q_, head h.
  void fill_tile(Index h, Index count) {
    panel_gemm<Store::overwrite>(count, g_.dim_qk, kPanelVectors,
                                 Broadcast<Real>{k_.rows, k_.stride, 1}, q_.x.data, kQueries,
                                 dots_.data, kQueries);
    if (rank() > 0)
      panel_gemm<Store::overwrite>(count, rank(), kPanelVectors,
                                   Broadcast<Real>{k_.projected.data, 1, kQueries},
                                   q_.projected.data, kQueries, projected_dots_.data, kQueries);
    std::array<P, 2> key_features[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v)
      score_.key_features_of(k_.row(v), key_features[v].data());
    ScalarsOf<DarScore<Real>, P> p;
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = scalar_of<Real>(score_, int(i), h);
    for (int v = 0; v < kPanelVectors; ++v) {
      PairOf<DarScore<Real>, P> pair;
      pair.query = query_features_[v];
      for (Index r = 0; r < count; ++r) {
        const auto& features = key_features[r / kLanes<Real>];
        for (std::size_t f = 0; f < 2; ++f) pair.key[f] = features[f].lane(int(r % kLanes<Real>));
        pair.dot = dots_.load(r, v);
        if (rank() > 0) pair.projected = projected_dots_.load(r, v);
        input_.store(r, v, score_.gate_input(pair));
        resonance_.store(r, v, score_.resonance(pair, p));
      }
    }
  }

  const DarScore<Real>& score_;
  const TensorView<const Real>&query_, &key_;
  Geometry g_;
  const BoundMask<Real>& mask_;
  Scratch<Real> scratch_;
  RowTiles q_, k_;
  LaneTile<Real> dots_, projected_dots_, resonance_, input_;
  std::array<P, 2> query_features_[kPanelVectors];  // n is in the rows, and here 1
};

// The sizes of a call; throws when they do not fit.
template <class Real>
[[nodiscard]] Geometry resonance_geometry(const TensorView<const Real>& query,
                                          const TensorView<const Real>& key, const char* where) {
  const Shape &q = query.shape(), &k = key.shape();
  require(q.dim > 0, where, ": query has dim ", q.dim, ", it must be positive");
  require(k.dim == q.dim, where, ": key has dim_qk ", k.dim, ", query has ", q.dim);
  require(k.batch == q.batch, where, ": key has batch ", k.batch, ", query has ", q.batch);
  require(k.heads > 0 ? q.heads % k.heads == 0 : q.heads == 0, where, ": key has ", k.heads,
          " heads, which does not divide the query's ", q.heads);
  require(query.page_rows() == 0 && key.page_rows() == 0, where,
          ": query or key has pages, they must lie in one piece");
  require(query.data() != nullptr || !query.has_elements(), where, ": query is null, shape ", q);
  require(key.data() != nullptr || !key.has_elements(), where, ": key is null, shape ", k);
  return {.batch = q.batch,
          .heads = q.heads,
          .query_heads = q.heads,
          .kv_heads = k.heads,
          .len_q = q.len,
          .len_kv = k.len,
          .dim_qk = q.dim,
          .dim_v = q.dim};
}

template <class Real>
[[nodiscard]] Index resonance_blocks(const Geometry& g) {
  return (g.len_q + ResonanceBlock<Real>::kQueries - 1) / ResonanceBlock<Real>::kQueries;
}

// body(block, b, h, first query, unit) for every block of queries; units count from 0, blocks
// inside, batches outside.
template <class Real, class Body>
void for_each_resonance_block(const DarScore<Real>& score, const TensorView<const Real>& query,
                              const TensorView<const Real>& key, const Geometry& g,
                              const BoundMask<Real>& mask, int threads, Body&& body) {
  constexpr Index width = ResonanceBlock<Real>::kQueries;
  const Index blocks = resonance_blocks<Real>(g);
  parallel_for(g.batch * g.heads * blocks, resolve_threads(threads), [&](Index unit) {
    ResonanceBlock<Real> block(score, query, key, g, mask);
    body(block, unit / blocks / g.heads, unit / blocks % g.heads, unit % blocks * width, unit);
  });
}

struct ResonanceSums {
  double resonance = 0.0;
  Index crossings = 0, pairs = 0;
};

// Adds up units in their order, whoever computed them.
[[nodiscard]] inline ResonanceStatistics total_per_head(const std::vector<ResonanceSums>& units,
                                                        const Geometry& g, Index blocks) {
  ResonanceStatistics result;
  for (Index h = 0; h < g.heads; ++h) {
    ResonanceSums total;
    for (Index b = 0; b < g.batch; ++b)
      for (Index i = 0; i < blocks; ++i) {
        const ResonanceSums& s = units[std::size_t((b * g.heads + h) * blocks + i)];
        total.resonance += s.resonance;
        total.crossings += s.crossings;
        total.pairs += s.pairs;
      }
    const double pairs = double(std::max<Index>(total.pairs, 1));
    result.crossing.push_back(double(total.crossings) / pairs);
    result.mean_resonance.push_back(total.resonance / pairs);
    result.visible_pairs.push_back(total.pairs);
  }
  return result;
}

}  // namespace detail

// An op that scores by adaptive resonance, whatever its normaliser and readout.
template <class Op>
concept ResonantOp =
    AttentionOp<Op> && std::same_as<typename Op::ScoreType, DarScore<typename Op::Scalar>>;

// Writes r_ij to `out` (batch, heads, len_q, len_kv), which must not overlap query or key; 0 where
// the mask hides the pair.
template <ResonantOp Op, class Real = typename Op::Scalar>
void resonance_map(const Op& op, std::type_identity_t<TensorView<const Real>> query,
                   std::type_identity_t<TensorView<const Real>> key,
                   std::type_identity_t<TensorView<Real>> out,
                   const std::type_identity_t<Mask<Real>>& mask = {}, int threads = 0) {
  constexpr const char* where = "heed::resonance_map";
  const Geometry g = detail::resonance_geometry<Real>(query, key, where);
  validate(op.score, g, where);
  const Shape expected{g.batch, g.heads, g.len_q, g.len_kv};
  require(out.shape() == expected, where, ": out has shape ", out.shape(), ", it must be ",
          expected);
  require(out.data() != nullptr || !out.has_elements(), where, ": out is null, shape ", expected);
  require(!may_overlap(out, query) && !may_overlap(out, key), where,
          ": out overlaps query or key; it needs memory of its own");
  const BoundMask<Real> bound(mask, g, where);
  detail::for_each_resonance_block<Real>(
      op.score, query, key, g, bound, threads,
      [&](auto& block, Index b, Index h, Index first, Index) {
        for (Index i = first; i < std::min(first + block.kQueries, g.len_q); ++i)
          std::fill_n(out.row(b, h, i), g.len_kv, Real(0));
        block.run(b, h, first, [&](const auto& tile) {
          tile.for_each_visible(bound,
                                [&](Index i, Index j, Real r, Real) { out.row(b, h, i)[j] = r; });
        });
      });
}

// How often, and how much, each head resonates.
template <ResonantOp Op, class Real = typename Op::Scalar>
[[nodiscard]] ResonanceStatistics resonance_statistics(
    const Op& op, std::type_identity_t<TensorView<const Real>> query,
    std::type_identity_t<TensorView<const Real>> key,
    const std::type_identity_t<Mask<Real>>& mask = {}, int threads = 0) {
  constexpr const char* where = "heed::resonance_statistics";
  const Geometry g = detail::resonance_geometry<Real>(query, key, where);
  validate(op.score, g, where);
  const BoundMask<Real> bound(mask, g, where);
  std::vector<detail::ResonanceSums> blocks(
      std::size_t(g.batch * g.heads * detail::resonance_blocks<Real>(g)));
  detail::for_each_resonance_block<Real>(
      op.score, query, key, g, bound, threads,
      [&](auto& block, Index b, Index h, Index first, Index unit) {
        const Real rho = op.score.vigilance.head(h);
        detail::ResonanceSums sums;
        block.run(b, h, first, [&](const auto& tile) {
          tile.for_each_visible(bound, [&](Index, Index, Real r, Real input) {
            sums.resonance += double(r);
            sums.crossings += ResonanceGate::crosses(input, rho);
            ++sums.pairs;
          });
        });
        blocks[std::size_t(unit)] = sums;
      });
  return detail::total_per_head(blocks, g, detail::resonance_blocks<Real>(g));
}

}  // namespace HEED_ABI
}  // namespace heed
