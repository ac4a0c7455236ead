// SPDX-License-Identifier: Apache-2.0
#pragma once

// Derived values of keys: features, transformed and projected rows, and tables, computed once per call, ahead of it or tile by
// tile on the way; and the way of their gradients back into dK. In forward mode the same of numbers that move, on DualLanes:
//
//   transform t(x)   t. = dt/dx x. + dt/dp p.       x. below is t. where there is one
//   feature f(x)     f. = sum_c df/dx_c x._c
//   projected row    (P^T x). = P^T x.              the projection stands still
//   table entry      (W x). = W. x + W x.
//
// and in forward over backward their gradients' way back, both on numbers that move (op_hvps.hpp):
//
//   df -> df . df/dk,   then   dK -> dK . dt/dk
//
// Memory  (key_features + rank) numbers, and dim_qk more where rows are transformed, per key, map and head; as many again where
//         they move. O(len_kv), nothing for scores that ask for nothing, nor where a caller's KeyFeatures hold them.

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
#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// What the score of a call derives of rows, and for whom.
template <class Real>
struct DerivedNeeds {
  bool any;
  Index rank, table_rows;
  Index transformed = 0;  // width of transformed rows; 0 where keys are read as they are
  // Do the heads of a group read the same columns of their own key-value head?
  bool keys_by_group;
  // Do the keys' derived values depend on the query head that reads them?
  bool per_query_head;
  // Are table rows those of the categories of keys?
  bool has_categories;

  DerivedNeeds(const OpTiles<Real>& op, const Geometry& g)
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

// How keys, numbers of their tokens and a score's parameters move; those that are not given stand still.
template <class Real>
struct KeyDirection {
  const RowFormulas<Real, DualLanes<Real>>* score = nullptr;
  TensorView<const Real> key = {}, inputs = {};
};

// Sums of gradients of what a score derives of rows, or the tangents of such sums.
template <class Real>
struct DerivedSums {
  std::vector<Real> dfeatures;      // laid out by DerivedKeys::row()
  std::vector<Real> drows;          // of transformed and projected keys
  std::vector<Real> dquery_inputs;  // [batch][head][query][inputs]
  std::vector<Real> dkey_inputs;    // laid out by DerivedKeys::row()
};

template <class Real>
class DerivedKeys {
 public:
  using Needs = DerivedNeeds<Real>;

  // inputs: numbers of the keys' tokens, where the score reads them.
  // kept: where features and projected rows are found and kept, or null. Throws std::invalid_argument, its sentence
  // starting with `where`, if those that it has are not of such a call. direction: in forward mode.
  DerivedKeys(const OpTiles<Real>& op, const Geometry& g, const StoredView<const Real>& key,
              KeyFeatures<Real>* kept = nullptr, const std::string& where = {},
              const TensorView<const Real>& inputs = {}, const KeyDirection<Real>& direction = {})
      : op_(op),
        traits_(op.score.traits),
        g_(g),
        key_(key),
        inputs_(inputs),
        direction_(direction),
        needs_(op, g),
        stride_(g.held_keys()) {
    take_plane(0, op.score);
    if (direction.score) take_plane(1, *direction.score);
    if (!needs_.any) return;
    if (kept && may_be_kept(traits_) && key.has_elements()) take_kept(*kept, where);
    if (!kept_) take_own(planes_[0]);
    if (direction.score) take_own(planes_[1]);
  }
  DerivedKeys(const DerivedKeys&) = delete;  // planes refer to its memory

  [[nodiscard]] const Needs& needs() const { return needs_; }
  // plane: 0 for numbers, 1 for their tangents.
  [[nodiscard]] const PositionTable<Real>& positions(int plane = 0) const {
    return planes_[plane].positions;
  }
  // Are derived values read from, and added to, those that a caller keeps? They are then build() ahead of the call.
  [[nodiscard]] bool keeps() const { return kept_ != nullptr; }
  [[nodiscard]] Index bytes() const {
    std::size_t count = 0;
    for (const Plane& own : planes_)
      count += own.own_features.size() + own.own_rows.size() + own.tables.size();
    return Index(count * sizeof(Real));
  }
  // May a call of this op on these keys take what is kept?
  [[nodiscard]] static bool fits(const KeyFeatures<Real>& kept, const OpTiles<Real>& op, Geometry g,
                                 const StoredView<const Real>& key) {
    if (!may_be_kept(op.score.traits) || kept.len_ == 0) return true;
    g.batch = key.shape().batch;
    g.len_kv = 0;  // no features
    return kept.stamp_.difference(DerivedKeys(op, g, key).stamp()).empty();
  }

  // Fills all derived values, or those that are not kept yet; constant afterwards. On DualLanes: and their tangents.
  template <class Lanes = LaneTile<Real>>
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
    const Index elements =
        scratch_elements<Real>([&](Scratch<Real>& s) { return take_tiles<Lanes>(s); }) +
        scratch_elements<Real>(take_keys);
    parallel_for(g_.batch * heads(), threads, [&](Index unit) {
      const Index b = unit / heads(), h = reader(unit % heads());
      Scratch<Real> scratch(elements);
      const TilesOf<Lanes> tiles = take_tiles<Lanes>(scratch);
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
  template <class Lanes>
  struct TilesOf {
    DerivedTiles<Real, Lanes> derived;
    Lanes features;
  };
  using Tiles = TilesOf<LaneTile<Real>>;
  // Fills those of keys [first, first + count), which `keys` holds, as query head h reads them.
  template <class Lanes>
  void build(const TilesOf<Lanes>& tiles, const TensorView<const Real>& keys, Index b, Index h,
             Index first, Index count) {
    if (!needs_.any) return;
    for (int map = 0; map < op_.maps(); ++map)
      for (Index j = first; j < first + count; j += kWidth)
        build_block(tiles, keys, b, h, map, j, std::min(kWidth, first + count - j));
  }
  // Room for build(); nothing for scores that derive nothing.
  template <class Lanes = LaneTile<Real>>
  [[nodiscard]] TilesOf<Lanes> take_tiles(Scratch<Real>& scratch) const {
    if (!needs_.any) return {};
    return {take_side<Lanes>(scratch, g_.dim_qk),
            Lanes::take(scratch, traits_.key_features, kWidth)};
  }

  // Do query heads h and other read the same derived values?
  [[nodiscard]] bool read_alike(Index h, Index other) const {
    return derived_head(h) == derived_head(other);
  }

  // Feature 0 of keys j, j + 1, ... as query head h reads them; feature i stands i * feature_stride() further on. Null for scores
  // without features of keys.
  [[nodiscard]] const Real* features(Index b, Index h, int map, Index j, int plane = 0) const {
    if (traits_.key_features == 0) return nullptr;
    return planes_[plane].features + feature_at(b, h, map, 0, j);
  }
  [[nodiscard]] Index feature_stride() const { return stride_; }
  [[nodiscard]] Rows<Real> projected(Index b, Index h, int map, Index j, Index count,
                                     int plane = 0) const {
    return {row_numbers_at(b, h, map, j, plane) + needs_.transformed, count, needs_.rank,
            needs_.row_numbers()};
  }
  // The first `width` columns of keys j, j + 1, ... after the score's transform.
  [[nodiscard]] Rows<Real> transformed(Index b, Index h, int map, Index j, Index count, Index width,
                                       int plane = 0) const {
    return {row_numbers_at(b, h, map, j, plane), count, width, needs_.row_numbers()};
  }
  // The table of head h, and how it moves.
  template <class Lanes = LaneTile<Real>>
  [[nodiscard]] typename DerivedTiles<Real, Lanes>::Tables tables(Index h) const {
    typename DerivedTiles<Real, Lanes>::Tables all;
    for (std::size_t n = 0; n < all.size(); ++n) all[n] = planes_[n].tables.data() + table_at(h);
    return all;
  }
  // Position of key j's derived values in arrays over (batch, head, map, key).
  [[nodiscard]] Index row(Index b, Index h, int map, Index j) const {
    return ((b * heads() + derived_head(h)) * op_.maps() + map) * stride_ + j -
           g_.share.keys_before;
  }
  [[nodiscard]] Index row_count() const { return g_.batch * heads() * op_.maps() * g_.held_keys(); }

  // Does chain() add to parameters?
  [[nodiscard]] static bool reaches_parameters(const ScoreTraits& score) {
    return derives_of_keys(score) && (score.key_features_read_p || score.has_transform);
  }
  // What chain() reads of the sums of panels, and where it adds if it is given.
  template <class Lanes>
  struct Chain {
    const RowVjps<Real, Lanes>& vjps;
    DerivedSums<Real>* sums[Lanes::planes];
    const TensorView<Real>& grad_key;
    PartGradient<Real>* parameters;
    bool inputs;  // are the sums' dkey_inputs asked for?
  };
  // Adds to grad_key what the gradients of features and of transformed and projected keys contribute, or, where keys move, the
  // tangent of it; to `parameters` what those of features and transforms do, and to the sums' dkey_inputs what those of
  // features do.
  template <class Lanes>
  void chain(const Chain<Lanes>& to, int threads) {
    if (!derives_of_keys(traits_)) return;
    PartGradient<Real>* const parameters = to.parameters;
    if (!to.grad_key.given() && !to.inputs && !(reaches_parameters(traits_) && parameters)) return;
    // Kept per (batch, head, map) and summed in that order: the bits do not depend on threads.
    const Index scalars = traits_.key_features_read_p ? traits_.scalars : 0, maps = op_.maps();
    std::vector<double> dscalars(std::size_t(g_.batch * heads() * maps * scalars));
    std::vector<std::unique_ptr<PartGradient<Real>>> dtransform;
    for (Index n = 0; traits_.has_transform && n < g_.batch * heads() * maps; ++n)
      dtransform.push_back(to.vjps.gradient());
    const auto at = [&](Index b, Index own, Index map) { return (b * heads() + own) * maps + map; };
    parallel_for(g_.batch * g_.kv_heads, threads, [&](Index unit) {
      const Index b = unit / g_.kv_heads, kv = unit % g_.kv_heads;
      for (Index own = 0; own < heads(); ++own)
        for (int map = 0; map < maps; ++map)
          if (op_.normaliser.source(g_, reader(own), map).kv_head == kv) {
            const Index n = at(b, own, map);
            chain_head(to, b, reader(own), map, dscalars.data() + n * scalars,
                       traits_.has_transform ? dtransform[std::size_t(n)].get() : nullptr);
          }
    });
    if (!parameters) return;
    add_in_order(dtransform, *parameters);
    for (Index own = 0; scalars > 0 && own < heads(); ++own) {
      std::vector<double> sums(std::size_t(scalars), 0.0);
      for (Index b = 0; b < g_.batch; ++b)
        for (Index map = 0; map < maps; ++map)
          for (Index i = 0; i < scalars; ++i)
            sums[std::size_t(i)] += dscalars[std::size_t(at(b, own, map) * scalars + i)];
      to.vjps.add_scalars(reader(own), sums.data(), *parameters);
    }
  }
  // Adds gradients of the parameters, in their order, to `to`.
  static void add_in_order(std::span<const std::unique_ptr<PartGradient<Real>>> gradients,
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

  // Derived values, or their tangents.
  struct Plane {
    PositionTable<Real> positions;
    std::vector<Real> tables, own_features, own_rows;
    Real *features = nullptr, *rows = nullptr;  // its own, or those that are kept
  };
  template <class Lanes>
  void take_plane(int n, const RowFormulas<Real, Lanes>& formulas) {
    planes_[n].positions = formulas.position_table(g_);
    if (!needs_.any) return;
    planes_[n].tables.resize(std::size_t(table_at(g_.heads)));
    if (traits_.has_table)
      for (Index h = 0; h < g_.heads; ++h)
        formulas.prepare_table(h, g_.dim_qk, planes_[n].tables.data() + table_at(h));
  }
  void take_own(Plane& plane) {
    plane.own_features.resize(std::size_t(row_count() * traits_.key_features));
    plane.own_rows.resize(std::size_t(row_count() * needs_.row_numbers()));
    plane.features = plane.own_features.data();
    plane.rows = plane.own_rows.data();
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
    planes_[0].features = kept.features_.data();
    planes_[0].rows = kept.projected_.data();
  }
  [[nodiscard]] detail::KeyFeaturesStamp<Real> stamp() const {
    detail::KeyFeaturesStamp<Real> stamp;
    stamp.op = op_.type;
    stamp.keys = {g_.batch, g_.kv_heads, 0, g_.dim_qk};
    stamp.address = MemoryView(key_).address(0);
    stamp.heads = heads();
    for (Index own = 0; own < heads(); ++own)
      for (int map = 0; map < op_.maps(); ++map) {
        const Source source = op_.normaliser.source(g_, reader(own), map);
        for (const Index number : {source.kv_head, source.key_column, source.width})
          stamp.sources.push_back(number);
      }
    if (needs_.has_categories) stamp.tables.numbers = planes_[0].tables;
    op_.score.stamp(stamp);
    return stamp;
  }
  [[nodiscard]] Index feature_at(Index b, Index h, int map, int i, Index j) const {
    const Index first = g_.share.keys_before;
    return row(b, h, map, first) * traits_.key_features + i * stride_ + j - first;
  }
  // Heads that have derived values of their own; none where no head reads any.
  [[nodiscard]] Index heads() const {
    return needs_.per_query_head || g_.heads == 0 ? g_.heads : g_.kv_heads;
  }
  [[nodiscard]] Index derived_head(Index h) const {
    return needs_.per_query_head ? h : g_.kv_head(h);
  }
  [[nodiscard]] Index table_at(Index h) const { return h * needs_.table_rows * g_.dim_qk; }
  // A query head that reads derived head hf.
  [[nodiscard]] Index reader(Index hf) const {
    return needs_.per_query_head ? hf : hf * g_.group();
  }
  template <class Lanes>
  [[nodiscard]] DerivedTiles<Real, Lanes> take_side(Scratch<Real>& scratch, Index width) const {
    return DerivedTiles<Real, Lanes>::take(scratch, width, needs_.rank, needs_.key_table_rows(),
                                           traits_.key_inputs, kWidth);
  }
  // The transformed and the projected row of key j.
  [[nodiscard]] Real* row_numbers_at(Index b, Index h, int map, Index j, int plane) const {
    return planes_[plane].rows + row(b, h, map, j) * needs_.row_numbers();
  }
  template <class Lanes>
  [[nodiscard]] const RowFormulas<Real, Lanes>& formulas() const {
    if constexpr (Lanes::planes > 1)
      return *direction_.score;
    else
      return op_.score;
  }

  // Lane tiles of keys [j, j + count) as they are stored, and as head h reads them.
  template <class Lanes>
  void load_rows(const Lanes& to, const TensorView<const Real>& keys, Index b, const Source& source,
                 Index j, Index count) const {
    for (int n = 0; n < Lanes::planes; ++n)
      detail::pack_stored(n > 0 ? direction_.key : keys, {b, source.kv_head, j, count},
                          source.key_column, to.plane(n));
  }
  template <class Lanes>
  void load(const DerivedTiles<Real, Lanes>& tiles, const TensorView<const Real>& keys, Index b,
            Index h, const Source& source, Index j, Index count) const {
    load_rows(tiles.x, keys, b, source, j, count);
    if (traits_.has_transform) formulas<Lanes>().transform(RowSide::key, h, j, kVectors, tiles.x);
    for (int n = 0; n < Lanes::planes; ++n)
      detail::load_inputs(n > 0 ? direction_.inputs : inputs_, g_, {b, h, j, count},
                          tiles.input.plane(n));
    tiles.derive(op_.score.projection, tables<Lanes>(h), kVectors);
  }
  template <class Lanes>
  void build_block(TilesOf<Lanes> tiles, const TensorView<const Real>& keys, Index b, Index h,
                   int map, Index j, Index count) {
    const Source source = op_.normaliser.source(g_, h, map);
    tiles.derived.x.rows = source.width;
    load(tiles.derived, keys, b, h, source, j, count);
    if (traits_.key_features > 0)
      formulas<Lanes>().features(RowSide::key, tiles.derived, h, j, nullptr, vectors_of(count),
                                 tiles.features);
    const Index numbers = needs_.row_numbers();
    for (int n = 0; n < Lanes::planes; ++n) {
      const DerivedTiles<Real> derived = tiles.derived.plane(n);
      for (int i = 0; i < traits_.key_features; ++i)
        std::copy_n(tiles.features.plane(n).row(i), count,
                    planes_[n].features + feature_at(b, h, map, i, j));
      if (numbers == 0) continue;
      Real* rows = row_numbers_at(b, h, map, j, n);
      if (needs_.transformed > 0)
        unpack_lanes(derived.x.data, kWidth, count, source.width, rows, numbers);
      if (needs_.rank > 0)
        unpack_lanes(derived.projected.data, kWidth, count, needs_.rank, rows + needs_.transformed,
                     numbers);
    }
  }
  [[nodiscard]] static int vectors_of(Index count) {
    return int((count + kLanes<Real> - 1) / kLanes<Real>);
  }

  // Lane tiles of kWidth keys on their way back.
  template <class Lanes>
  struct Chained {
    DerivedTiles<Real, Lanes> tiles, grads;
    Lanes before, work, dfeatures, dscalars;
    LaneTile<Real> features;
  };
  // The keys of one head and map: what chain() adds.
  template <class Lanes>
  void chain_head(const Chain<Lanes>& to, Index b, Index h, int map, double* dscalars,
                  PartGradient<Real>* dtransform) const {
    const Source source = op_.normaliser.source(g_, h, map);
    const Index width = source.width, transformed = traits_.has_transform ? width : 0;
    const auto take_all = [&](Scratch<Real>& s) {
      const auto take = [&](Index rows) { return Lanes::take(s, rows, kWidth); };
      return Chained<Lanes>{take_side<Lanes>(s, width),
                            take_side<Lanes>(s, width),
                            take(transformed),
                            take(transformed),
                            take(traits_.key_features),
                            take(traits_.scalars),
                            LaneTile<Real>::take(s, traits_.key_features, kWidth)};
    };
    Scratch<Real> scratch(scratch_elements<Real>(take_all));
    const Chained<Lanes> c = take_all(scratch);
    const TensorView<const Real> keys = key_.plain();
    const Index numbers = needs_.row_numbers();
    // Rows of the sums in lanes.
    const auto load_sums = [&](Index at, Index first, const Lanes& tile, Index count) {
      for (int n = 0; n < Lanes::planes; ++n)
        pack_lanes(to.sums[n]->drows.data() + at * numbers + first, numbers, count, tile.rows,
                   tile.plane(n).data, kWidth);
    };
    // Invariant: the rows of keys before j have all that this head gives them.
    for (Index j = g_.share.keys_before, end = g_.held_keys_end(); j < end; j += kWidth) {
      const Index count = std::min(kWidth, end - j), at = row(b, h, map, j);
      load(c.tiles, keys, b, h, source, j, count);
      c.grads.fill(Real(0));
      if (needs_.rank > 0) load_sums(at, needs_.transformed, c.grads.projected, count);
      if (traits_.key_features > 0) chain_features(to, c, h, j, count, at, dscalars);
      if (to.grad_key.given() || traits_.has_transform)
        c.grads.chain(op_.score.projection, tables<Lanes>(h), kVectors);
      if (traits_.has_transform) {
        load_sums(at, 0, c.work, count);
        for (int v = 0; v < kVectors; ++v)
          for (Index col = 0; col < width; ++col) c.grads.x.add(col, v, c.work.load(col, v));
        load_rows(c.before, keys, b, source, j, count);
        to.vjps.transform_vjp(RowSide::key, h, j, count, c.before, c.work, c.grads.x, *dtransform);
      }
      if (to.grad_key.given())
        add_unpacked_lanes(last_plane(c.grads.x).data, kWidth, count, width,
                           to.grad_key.row(b, source.kv_head, j) + source.key_column,
                           to.grad_key.strides().row);
      for (int n = 0; to.inputs && n < Lanes::planes; ++n)
        add_unpacked_lanes(c.grads.input.plane(n).data, kWidth, count, traits_.key_inputs,
                           to.sums[n]->dkey_inputs.data() + at * traits_.key_inputs,
                           traits_.key_inputs);
    }
  }
  // Features of `count` keys from j on, whose first has its derived values at row `at`.
  template <class Lanes>
  void chain_features(const Chain<Lanes>& to, const Chained<Lanes>& c, Index h, Index j,
                      Index count, Index at, double* dscalars) const {
    c.dfeatures.fill(Real(0));
    for (int p = 0; p < Lanes::planes; ++p) {
      const Real* from = to.sums[p]->dfeatures.data() + at * traits_.key_features;
      for (Index n = 0; n < count; ++n)
        for (int i = 0; i < traits_.key_features; ++i)
          c.dfeatures.plane(p).row(i)[n] = from[n * traits_.key_features + i];
    }
    c.dscalars.fill(Real(0));
    if constexpr (Lanes::planes == 1)
      op_.score.features(RowSide::key, c.tiles, h, j, nullptr, kVectors, c.features);
    to.vjps.features_vjp(RowSide::key, c.tiles, h, j, nullptr, kVectors, c.features, c.dfeatures,
                         c.grads, c.dscalars);
    if (!traits_.key_features_read_p) return;
    for (int v = 0; v < kVectors; ++v)
      for (int i = 0; i < traits_.scalars; ++i)
        dscalars[i] += sum_valid_lanes(last_plane(c.dscalars).load(i, v), v, count);
  }

  const OpTiles<Real>& op_;
  const ScoreTraits& traits_;
  Geometry g_;
  StoredView<const Real> key_;
  TensorView<const Real> inputs_;
  KeyDirection<Real> direction_;
  Needs needs_;
  KeyFeatures<Real>* kept_ = nullptr;
  Index stride_;  // keys for which an array of features has room
  Plane planes_[2];
};

}  // namespace HEED_ABI
}  // namespace heed
