// SPDX-License-Identifier: Apache-2.0
#pragma once

// Side values of keys: features, transformed and projected rows, and tables, computed once per call, ahead of it or tile by
// tile on the way; and the way of their gradients back into dK.
//
// Memory  (key_features + rank) numbers, and dim_qk more where rows are transformed, per key, map and head; O(len_kv), nothing for scores that ask
//         for nothing, nor where a caller's KeyFeatures hold them.

#include <heed/core/parallel.hpp>
#include <heed/engine/checks.hpp>
#include <heed/engine/sources.hpp>
#include <heed/engine/tile/products.hpp>
#include <heed/engine/token_inputs.hpp>
#include <heed/engine/vjps.hpp>
#include <heed/engine/widened.hpp>
#include <heed/simd/scratch.hpp>
#include <heed/simd/transpose.hpp>

#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// What the score of a call derives of rows, and for whom.
template <class Real>
struct SideNeeds {
  bool any;
  Index rank, table_rows;
  Index transformed = 0;  // width of transformed rows; 0 where keys are read as they are
  // Do the heads of a group read the same columns of their own key-value head?
  bool keys_by_group;
  // Do the keys' side values depend on the query head that reads them?
  bool per_query_head;
  // Are table rows those of the categories of keys?
  bool has_categories;

  SideNeeds(const OpTiles<Real>& op, const Geometry& g)
      : any(op.score.traits.derives()),
        rank(op.score.rank()),
        table_rows(op.score.table_rows()),
        keys_by_group(detail::reads_keys_by_group(op, g)),
        has_categories(op.score.traits.has_table && !op.score.traits.table_by_distance) {
    const ScoreTraits& score = op.score.traits;
    per_query_head = op.maps() > 1 || has_categories || score.key_inputs > 0 || !keys_by_group ||
                     (score.key_features_read_p && score.scalars_differ);
    if (!score.has_transform) return;
    transformed = g.dim_qk;
    per_query_head = per_query_head || op.score.transform_differs();
  }
  // Numbers of a key's row beside its features: those of the transformed row, then those of the projected one.
  [[nodiscard]] Index row_numbers() const { return transformed + rank; }
  // Rows of the products of keys with the table, which tell their categories.
  [[nodiscard]] Index key_table_rows() const { return has_categories ? table_rows : 0; }
};

template <class Real>
class KeySide {
 public:
  using Needs = SideNeeds<Real>;

  // inputs: numbers of the keys' tokens, where the score reads them.
  // kept: where features and projected rows are found and kept, or null. Throws std::invalid_argument, its sentence
  // starting with `where`, if those that it has are not of such a call.
  KeySide(const OpTiles<Real>& op, const Geometry& g, const StoredView<const Real>& key,
          KeyFeatures<Real>* kept = nullptr, const std::string& where = {},
          const TensorView<const Real>& inputs = {})
      : op_(op),
        traits_(op.score.traits),
        g_(g),
        key_(key),
        inputs_(inputs),
        needs_(op, g),
        positions_(op.score.position_table(g)),
        stride_(g.held_keys()) {
    if (!needs_.any) return;
    tables_.resize(std::size_t(g.heads * needs_.table_rows * g.dim_qk));
    if (traits_.has_table)
      for (Index h = 0; h < g.heads; ++h) op.score.prepare_table(h, g.dim_qk, table_data(h));
    if (kept && may_be_kept(traits_) && key.has_elements()) take_kept(*kept, where);
    if (!kept_) take_own();
  }
  KeySide(const KeySide&) = delete;  // features_ and projected_ refer to its memory

  [[nodiscard]] const Needs& needs() const { return needs_; }
  [[nodiscard]] const PositionTable<Real>& positions() const { return positions_; }
  // Are side values read from, and added to, those that a caller keeps? They are then build() ahead of the call.
  [[nodiscard]] bool keeps() const { return kept_ != nullptr; }
  [[nodiscard]] Index bytes() const {
    return Index((own_features_.size() + own_projected_.size() + tables_.size()) * sizeof(Real));
  }
  // May a call of this op on these keys take what is kept?
  [[nodiscard]] static bool fits(const KeyFeatures<Real>& kept, const OpTiles<Real>& op, Geometry g,
                                 const StoredView<const Real>& key) {
    if (!may_be_kept(op.score.traits) || kept.len_ == 0) return true;
    g.batch = key.shape().batch;
    g.len_kv = 0;  // no features
    return kept.stamp_.difference(KeySide(op, g, key).stamp()).empty();
  }

  // Fills all side values, or those that are not kept yet; constant afterwards.
  void build(int threads) {
    if (!needs_.any) return;
    const Index first = kept_ ? std::min(kept_->len_, g_.len_kv) : g_.share.keys_before,
                end = g_.held_keys_end();
    if (first >= end) return;
    constexpr Index keys_per_thread = 64;
    threads =
        int(std::min<Index>(threads, 1 + g_.batch * heads() * (end - first) / keys_per_thread));
    const auto take_keys = [&](Scratch<Real>& s) {
      return TileOfRows<Real>(key_, kWidth, !needs_.keys_by_group, s);
    };
    const Index elements = scratch_elements<Real>([&](Scratch<Real>& s) { return take_tiles(s); }) +
                           scratch_elements<Real>(take_keys);
    parallel_for(g_.batch * heads(), threads, [&](Index unit) {
      const Index b = unit / heads(), h = reader(unit % heads());
      Scratch<Real> scratch(elements);
      const Tiles tiles = take_tiles(scratch);
      const TileOfRows<Real> keys = take_keys(scratch);
      for (Index j = first, count = 0; j < end; j += count) {
        count = std::min(kWidth - j % kWidth, end - j);  // of one page
        keys.load(b, g_.kv_head(h), j, count);
        build(tiles, keys.view(), b, h, j, count);
      }
    });
    if (kept_) kept_->len_ = g_.len_kv;
  }

  // Lane tiles of kWidth keys, and room for their features.
  struct Tiles {
    SideTiles<Real> side;
    LaneTile<Real> features;
  };
  // Fills those of keys [first, first + count), which `keys` holds, as query head h reads them.
  void build(const Tiles& tiles, const TensorView<const Real>& keys, Index b, Index h, Index first,
             Index count) {
    if (!needs_.any) return;
    for (int map = 0; map < op_.maps(); ++map)
      for (Index j = first; j < first + count; j += kWidth)
        build_block(tiles, keys, b, h, map, j, std::min(kWidth, first + count - j));
  }
  // Room for build(); nothing for scores that derive nothing.
  [[nodiscard]] Tiles take_tiles(Scratch<Real>& scratch) const {
    if (!needs_.any) return {};
    const SideTiles<Real> side = take_side(scratch, g_.dim_qk);
    return {side, take_features(scratch)};
  }

  // Do query heads h and other read the same side values?
  [[nodiscard]] bool shares(Index h, Index other) const { return side_head(h) == side_head(other); }

  // Feature 0 of keys j, j + 1, ... as query head h reads them; feature i stands i * feature_stride() further on. Null for scores
  // without features of keys.
  [[nodiscard]] const Real* features(Index b, Index h, int map, Index j) const {
    return traits_.key_features > 0 ? features_ + feature_at(b, h, map, 0, j) : nullptr;
  }
  [[nodiscard]] Index feature_stride() const { return stride_; }
  [[nodiscard]] Rows<Real> projected(Index b, Index h, int map, Index j, Index count) const {
    return {row_numbers_at(b, h, map, j) + needs_.transformed, count, needs_.rank,
            needs_.row_numbers()};
  }
  // The first `width` columns of keys j, j + 1, ... after the score's transform.
  [[nodiscard]] Rows<Real> transformed(Index b, Index h, int map, Index j, Index count,
                                       Index width) const {
    return {row_numbers_at(b, h, map, j), count, width, needs_.row_numbers()};
  }
  [[nodiscard]] const Real* table(Index h) const {
    return tables_.data() + h * needs_.table_rows * g_.dim_qk;
  }
  // Position of key j's side values in arrays over (batch, head, map, key).
  [[nodiscard]] Index row(Index b, Index h, int map, Index j) const {
    return ((b * heads() + side_head(h)) * op_.maps() + map) * stride_ + j - g_.share.keys_before;
  }
  [[nodiscard]] Index row_count() const { return g_.batch * heads() * op_.maps() * g_.held_keys(); }

  // Does chain() add to parameters?
  [[nodiscard]] static bool reaches_parameters(const ScoreTraits& score) {
    return derives_of_keys(score) && (score.key_features_read_p || score.has_transform);
  }
  // Adds to grad_key, if it is given, what the gradients of the features (`dfeatures`) and of transformed and projected keys
  // (`drows`), laid out by row(), contribute. What those of features and transforms do is added to `parameters`, and what
  // those of features do to `dinputs`, [row][inputs], where they are given, too.
  void chain(const ScoreVjps<Real>& vjps, const Real* dfeatures, const Real* drows,
             const TensorView<Real>& grad_key, PartGradient<Real>* parameters, Real* dinputs,
             int threads) {
    if (!derives_of_keys(traits_)) return;
    if (!grad_key.given() && !dinputs && !(reaches_parameters(traits_) && parameters)) return;
    // Kept per (batch, head, map) and summed in that order: the bits do not depend on threads.
    const Index scalars = traits_.key_features_read_p ? traits_.scalars : 0, maps = op_.maps();
    std::vector<double> dscalars(std::size_t(g_.batch * heads() * maps * scalars));
    std::vector<std::unique_ptr<PartGradient<Real>>> dtransform;
    for (Index n = 0; traits_.has_transform && n < g_.batch * heads() * maps; ++n)
      dtransform.push_back(vjps.gradient());
    const auto at = [&](Index b, Index side, Index map) {
      return (b * heads() + side) * maps + map;
    };
    parallel_for(g_.batch * g_.kv_heads, threads, [&](Index unit) {
      const Index b = unit / g_.kv_heads, kv = unit % g_.kv_heads;
      for (Index side = 0; side < heads(); ++side)
        for (int map = 0; map < maps; ++map)
          if (op_.normaliser.source(g_, reader(side), map).kv_head == kv) {
            const Index n = at(b, side, map);
            chain_head(vjps, b, reader(side), map, dfeatures, drows, grad_key,
                       dscalars.data() + n * scalars, dinputs,
                       traits_.has_transform ? dtransform[std::size_t(n)].get() : nullptr);
          }
    });
    if (!parameters) return;
    add_in_order(dtransform, *parameters);
    for (Index side = 0; scalars > 0 && side < heads(); ++side) {
      std::vector<double> sums(std::size_t(scalars), 0.0);
      for (Index b = 0; b < g_.batch; ++b)
        for (Index map = 0; map < maps; ++map)
          for (Index i = 0; i < scalars; ++i)
            sums[std::size_t(i)] += dscalars[std::size_t(at(b, side, map) * scalars + i)];
      vjps.add_scalars(reader(side), sums.data(), *parameters);
    }
  }
  // Adds gradients of the parameters, in their order, to `to`.
  static void add_in_order(const std::vector<std::unique_ptr<PartGradient<Real>>>& gradients,
                           PartGradient<Real>& to) {
    if (gradients.empty()) return;
    std::vector<double> sums(std::size_t(to.numbers()), 0.0);
    for (const auto& gradient : gradients) gradient->add_to(sums.data());
    to.add_from(sums.data());
  }

 private:
  static constexpr int kVectors = kPanelVectors;
  static constexpr Index kWidth = kPanelLanes<Real>;

  [[nodiscard]] static bool derives_of_keys(const ScoreTraits& score) {
    return score.key_features > 0 || score.has_projection || score.has_transform;
  }
  // Inputs of tokens come anew with each call.
  [[nodiscard]] static bool may_be_kept(const ScoreTraits& score) {
    return score.kept_features && score.key_inputs == 0 && derives_of_keys(score);
  }

  void take_own() {
    own_features_.resize(std::size_t(row_count() * traits_.key_features));
    own_projected_.resize(std::size_t(row_count() * needs_.row_numbers()));
    features_ = own_features_.data();
    projected_ = own_projected_.data();
  }
  void take_kept(KeyFeatures<Real>& kept, const std::string& where) {
    detail::KeyFeaturesStamp<Real> call = stamp();
    if (kept.len_ > 0) {
      const std::string difference = kept.stamp_.difference(call);
      require(difference.empty(), where, ": ", difference,
              "; KvCache::forget_features() makes room for those of this call");
    } else {
      kept.forget();
      kept.stamp_ = std::move(call);
    }
    kept.reserve(g_.batch * heads() * op_.maps(), g_.len_kv, traits_.key_features,
                 needs_.row_numbers());
    kept_ = &kept;
    stride_ = kept.room_;
    features_ = kept.features_.data();
    projected_ = kept.projected_.data();
  }
  [[nodiscard]] detail::KeyFeaturesStamp<Real> stamp() const {
    detail::KeyFeaturesStamp<Real> stamp;
    stamp.op = op_.type;
    stamp.keys = {g_.batch, g_.kv_heads, 0, g_.dim_qk};
    stamp.address = MemoryView(key_).address(0);
    stamp.heads = heads();
    for (Index side = 0; side < heads(); ++side)
      for (int map = 0; map < op_.maps(); ++map) {
        const Source source = op_.normaliser.source(g_, reader(side), map);
        for (const Index number : {source.kv_head, source.key_column, source.width})
          stamp.sources.push_back(number);
      }
    if (needs_.has_categories) stamp.tables.numbers = tables_;
    op_.score.stamp(stamp);
    return stamp;
  }
  [[nodiscard]] Index feature_at(Index b, Index h, int map, int i, Index j) const {
    const Index first = g_.share.keys_before;
    return row(b, h, map, first) * traits_.key_features + i * stride_ + j - first;
  }
  // Heads that have side values of their own; none where no head reads any.
  [[nodiscard]] Index heads() const {
    return needs_.per_query_head || g_.heads == 0 ? g_.heads : g_.kv_heads;
  }
  [[nodiscard]] Index side_head(Index h) const { return needs_.per_query_head ? h : g_.kv_head(h); }
  [[nodiscard]] Real* table_data(Index h) {
    return tables_.data() + h * needs_.table_rows * g_.dim_qk;
  }
  // A query head that reads side head hf.
  [[nodiscard]] Index reader(Index hf) const {
    return needs_.per_query_head ? hf : hf * g_.group();
  }
  [[nodiscard]] SideTiles<Real> take_side(Scratch<Real>& scratch, Index width) const {
    return SideTiles<Real>::take(scratch, width, needs_.rank, needs_.key_table_rows(),
                                 traits_.key_inputs, kWidth);
  }
  [[nodiscard]] LaneTile<Real> take_features(Scratch<Real>& scratch) const {
    return {scratch.take(traits_.key_features * kWidth), traits_.key_features, kWidth};
  }
  // The transformed and the projected row of key j.
  [[nodiscard]] Real* row_numbers_at(Index b, Index h, int map, Index j) const {
    return projected_ + row(b, h, map, j) * needs_.row_numbers();
  }

  // Lane tiles of keys [j, j + count) as head h reads them.
  void load(const SideTiles<Real>& tiles, const TensorView<const Real>& keys, Index b, Index h,
            const Source& source, Index j, Index count) const {
    pack_lanes(keys.row(b, source.kv_head, j) + source.key_column, keys.strides().row, count,
               source.width, tiles.x.data, kWidth);
    if (traits_.has_transform) op_.score.transform(RowSide::key, tiles, h, j, kVectors);
    if (traits_.key_inputs > 0)
      pack_lanes(detail::input_row(inputs_, g_, b, h, j), inputs_.strides().row, count,
                 traits_.key_inputs, tiles.input.data, kWidth);
    tiles.derive(op_.score.projection, table(h), kVectors);
  }
  void build_block(Tiles tiles, const TensorView<const Real>& keys, Index b, Index h, int map,
                   Index j, Index count) {
    const Source source = op_.normaliser.source(g_, h, map);
    tiles.side.x.rows = source.width;
    load(tiles.side, keys, b, h, source, j, count);
    if (traits_.key_features > 0) {
      op_.score.features(RowSide::key, tiles.side, h, j, nullptr, vectors_of(count),
                         tiles.features);
      for (int i = 0; i < traits_.key_features; ++i)
        std::copy_n(tiles.features.row(i), count, features_ + feature_at(b, h, map, i, j));
    }
    if (needs_.row_numbers() == 0) return;
    Real* rows = row_numbers_at(b, h, map, j);
    if (needs_.transformed > 0)
      unpack_lanes(tiles.side.x.data, kWidth, count, source.width, rows, needs_.row_numbers());
    if (needs_.rank > 0)
      unpack_lanes(tiles.side.projected.data, kWidth, count, needs_.rank, rows + needs_.transformed,
                   needs_.row_numbers());
  }
  [[nodiscard]] static int vectors_of(Index count) {
    return int((count + kLanes<Real> - 1) / kLanes<Real>);
  }

  // The keys of one head and map: what chain() adds.
  void chain_head(const ScoreVjps<Real>& vjps, Index b, Index h, int map, const Real* dfeatures,
                  const Real* drows, const TensorView<Real>& grad_key, double* dscalars,
                  Real* dinputs, PartGradient<Real>* dtransform) const {
    const Source source = op_.normaliser.source(g_, h, map);
    const auto take_rows = [&](Scratch<Real>& s) {
      return LaneTile<Real>{s.take(kWidth * needs_.transformed), source.width, kWidth};
    };
    const auto take_scalars = [&](Scratch<Real>& s) {
      return LaneTile<Real>{s.take(kWidth * traits_.scalars), traits_.scalars, kWidth};
    };
    const auto take_all = [&](Scratch<Real>& s) {
      return Chained{
          take_side(s, source.width), take_side(s, source.width), take_rows(s),   take_rows(s),
          take_features(s),           take_features(s),           take_scalars(s)};
    };
    Scratch<Real> scratch(scratch_elements<Real>(take_all));
    const Chained c = take_all(scratch);
    const TensorView<const Real> keys = key_.plain();
    for (Index j = g_.share.keys_before, end = g_.held_keys_end(); j < end; j += kWidth) {
      const Index count = std::min(kWidth, end - j), at = row(b, h, map, j);
      const Index numbers = needs_.row_numbers();
      load(c.tiles, keys, b, h, source, j, count);
      c.grads.x.fill(Real(0));
      c.grads.table.fill(Real(0));
      c.grads.input.fill(Real(0));
      if (needs_.rank > 0)
        pack_lanes(drows + at * numbers + needs_.transformed, numbers, count, needs_.rank,
                   c.grads.projected.data, kWidth);
      if (traits_.key_features > 0)
        chain_features(vjps, c, h, j, count, dfeatures + at * traits_.key_features, dscalars);
      if (grad_key.given() || traits_.has_transform)
        c.grads.chain(op_.score.projection, table(h), kVectors);
      if (traits_.has_transform) {
        pack_lanes(drows + at * numbers, numbers, count, source.width, c.work.data, kWidth);
        for (int v = 0; v < kVectors; ++v)
          for (Index col = 0; col < source.width; ++col) c.grads.x.add(col, v, c.work.load(col, v));
        pack_lanes(keys.row(b, source.kv_head, j) + source.key_column, keys.strides().row, count,
                   source.width, c.before.data, kWidth);
        vjps.transform_vjp(RowSide::key, h, j, count, c.before, c.work, c.grads.x, *dtransform);
      }
      if (grad_key.given())
        add_unpacked_lanes(c.grads.x.data, kWidth, count, source.width,
                           grad_key.row(b, source.kv_head, j) + source.key_column,
                           grad_key.strides().row);
      if (dinputs)
        add_unpacked_lanes(c.grads.input.data, kWidth, count, traits_.key_inputs,
                           dinputs + at * traits_.key_inputs, traits_.key_inputs);
    }
  }
  // Lane tiles of kWidth keys on their way back.
  struct Chained {
    SideTiles<Real> tiles, grads;
    LaneTile<Real> before, work, features, dfeatures, dscalars;
  };
  // dfeatures: [key][feature].
  void chain_features(const ScoreVjps<Real>& vjps, const Chained& c, Index h, Index j, Index count,
                      const Real* dfeatures, double* dscalars) const {
    c.dfeatures.fill(Real(0));
    for (Index n = 0; n < count; ++n)
      for (int i = 0; i < traits_.key_features; ++i)
        c.dfeatures.row(i)[n] = dfeatures[n * traits_.key_features + i];
    c.dscalars.fill(Real(0));
    op_.score.features(RowSide::key, c.tiles, h, j, nullptr, kVectors, c.features);
    vjps.features_vjp(RowSide::key, c.tiles, h, j, nullptr, kVectors, c.features, c.dfeatures,
                      c.grads, c.dscalars);
    if (!traits_.key_features_read_p) return;
    for (int v = 0; v < kVectors; ++v)
      for (int i = 0; i < traits_.scalars; ++i)
        dscalars[i] += sum_valid_lanes(c.dscalars.load(i, v), v, count);
  }

  const OpTiles<Real>& op_;
  const ScoreTraits& traits_;
  Geometry g_;
  StoredView<const Real> key_;
  TensorView<const Real> inputs_;
  Needs needs_;
  PositionTable<Real> positions_;
  KeyFeatures<Real>* kept_ = nullptr;
  Index stride_;  // keys for which an array of features has room
  std::vector<Real> own_features_, own_projected_, tables_;
  Real *features_ = nullptr, *projected_ = nullptr;  // its own, or those that are kept
};

}  // namespace HEED_ABI
}  // namespace heed
