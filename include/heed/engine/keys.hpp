// SPDX-License-Identifier: Apache-2.0
#pragma once

// Side values of keys: features, transformed and projected rows, and tables, computed once per call, ahead of it or tile by
// tile on the way; and the way of their gradients back into dK.
//
// Memory  (key_features + rank) numbers, and dim_qk more where rows are transformed, per key, map and head; O(len_kv), nothing for scores that ask
//         for nothing, nor where a caller's KeyFeatures hold them.

#include <heed/core/parallel.hpp>
#include <heed/engine/call.hpp>
#include <heed/engine/key_features.hpp>
#include <heed/engine/positions.hpp>
#include <heed/engine/sources.hpp>
#include <heed/engine/tile/products.hpp>
#include <heed/engine/token_inputs.hpp>
#include <heed/engine/widened.hpp>
#include <heed/plug/feature_calls.hpp>
#include <heed/plug/transform.hpp>
#include <heed/simd/scratch.hpp>
#include <heed/simd/transpose.hpp>

#include <array>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// What a score asks for, at run time.
template <class Op>
struct SideNeeds {
  using Score = typename Op::ScoreType;
  static constexpr int maps = Op::NormaliserType::maps;
  static constexpr bool any = Score::query_features > 0 || Score::key_features > 0 ||
                              Score::has_projection || Score::has_table || Score::has_transform;

  Index rank = 0, table_rows = 0;
  Index transformed = 0;  // width of transformed rows; 0 where keys are read as they are
  // Do the heads of a group read the same columns of their own key-value head?
  bool keys_by_group;
  // Do the keys' side values depend on the query head that reads them?
  bool per_query_head;
  // Are table rows those of the categories of keys?
  static constexpr bool has_categories = Score::has_table && !table_by_distance<Score>;
  // Do they read the parameters of that head?
  static constexpr bool key_parameters = features_read_parameters<detail::OfKeys, Score>;

  SideNeeds(const Op& op, const Geometry& g)
      : keys_by_group(detail::reads_keys_by_group(op.normaliser, g)),
        per_query_head(maps > 1 || has_categories || key_inputs_of<Score> > 0 || !keys_by_group ||
                       (key_parameters && detail::scalars_differ_by_head(op.score))) {
    if constexpr (Score::has_projection)
      rank = op.score.projection().given() ? op.score.projection().extent(1) : 0;
    if constexpr (Score::has_table) table_rows = op.score.table_size();
    if constexpr (Score::has_transform) {
      transformed = g.dim_qk;
      per_query_head = per_query_head || op.score.differs_by_head();
    }
  }
  // Of a key's row beside its features: those of the transformed row, then those of the projected one.
  [[nodiscard]] Index row_numbers() const { return transformed + rank; }
  // Of the products of keys with the table, which tell their categories.
  [[nodiscard]] Index key_table_rows() const { return has_categories ? table_rows : 0; }
};

// Lane tiles of a set of rows: the rows themselves, projected rows, table entries and inputs of their tokens.
template <class Real>
struct SideTiles {
  LaneTile<Real> x, projected, table, input;

  // Vector v of the rows, whose first has position `first`; queries see so many keys.
  [[nodiscard]] LaneRow<Real> row(int v, Index first, Pack<Real> visible = Real(0)) const {
    return {x.constant(),
            projected.constant(),
            table.constant(),
            v,
            Pack<Real>::iota() + Real(first + v * kLanes<Real>),
            visible,
            input.constant()};
  }
  [[nodiscard]] LaneRowGrad<Real> grad(int v) const { return {x, projected, table, v, input}; }

  [[nodiscard]] static SideTiles take(Scratch<Real>& scratch, Index width, Index rank,
                                      Index table_rows, Index inputs, Index lanes) {
    return {{scratch.take(width * lanes), width, lanes},
            {scratch.take(rank * lanes), rank, lanes},
            {scratch.take(table_rows * lanes), table_rows, lanes},
            {scratch.take(inputs * lanes), inputs, lanes}};
  }

  // Of tiles that hold gradients, before features are chained: lanes whose row no pair has read, so that
  // nothing flows back. The row may hold anything, and 0 times a NaN in it must not become its gradient.
  [[nodiscard]] auto idle_lanes(const Pack<Real>* dfeatures, int count, int v) const {
    const Pack<Real> zero = Real(0);
    auto idle = zero == zero;
    for (int i = 0; i < count; ++i) idle = idle & (dfeatures[i] == zero);
    for (const auto& tile : {projected, table})
      for (Index r = 0; r < tile.rows; ++r) idle = idle & (tile.load(r, v) == zero);
    return idle;
  }
  // Afterwards: no gradient for them.
  template <class Lanes>
  void clear_lanes(Lanes idle, int v) const {
    for (const auto& tile : {x, projected, table, input})
      for (Index r = 0; r < tile.rows; ++r) tile.store(r, v, zero_where(idle, tile.load(r, v)));
  }

  // The transformed rows in place of x, which are rows of head h from position `first` on.
  template <class Score>
  void transform(const Score& score, RowSide side, Index h, Index first, int vectors) const {
    if constexpr (Score::has_transform)
      for (int v = 0; v < vectors; ++v) score.transform(side, h, in_place(x, {}, v, first));
  }
  // Gradients the other way: d, of the transformed rows, becomes that of the rows `x`, of which the first `count` exist,
  // and those of the parameters are added to `grad`. Lanes of d that are 0 add nothing, whatever their row holds. `work`
  // has room for the rows.
  template <class Score>
  static void transform_vjp(const Score& score, RowSide side, Index h, Index first, Index count,
                            const LaneTile<Real>& x, const LaneTile<Real>& work,
                            const LaneTile<Real>& d, Score& grad) {
    for (int v = 0; v * kLanes<Real> < count; ++v) {
      const Pack<Real> zero = Real(0);
      auto idle = zero == zero;
      for (Index c = 0; c < d.rows; ++c) idle = idle & (d.load(c, v) == zero);
      const auto sum = [&](Pack<Real> terms) {
        return Real(sum_valid_lanes(zero_where(idle, terms), v, count));
      };
      const auto rows = in_place(work, x.constant(), v, first);
      rows.restore();
      score.transform_vjp(side, h, rows, in_place(d, {}, v, first), sum, grad);
      for (Index c = 0; c < d.rows; ++c) d.store(c, v, zero_where(idle, d.load(c, v)));
    }
  }
  [[nodiscard]] static LaneRowInPlace<Real> in_place(const LaneTile<Real>& rows,
                                                     const LaneTile<const Real>& before, int v,
                                                     Index first) {
    return {rows, before, v, Pack<Real>::iota() + Real(first + v * kLanes<Real>)};
  }

  // projected = P^T x and table = W x, both read in place.
  template <class Score>
  void derive(const Score& score, const Real* table_matrix, int vectors) const {
    const Index width = x.rows;
    if constexpr (Score::has_projection)
      if (projected.rows > 0)
        panel_gemm<Store::overwrite>(projected.rows, width, vectors,
                                     Broadcast<Real>{score.projection().data(), 1, projected.rows},
                                     x.data, x.lanes, projected.data, projected.lanes);
    if constexpr (Score::has_table)
      if (table.rows > 0)
        panel_gemm<Store::overwrite>(table.rows, width, vectors,
                                     Broadcast<Real>{table_matrix, width, 1}, x.data, x.lanes,
                                     table.data, table.lanes);
  }
  // Gradients the other way: `g` holds those of projected and table; adds to g.x.
  template <class Score>
  static void chain(const Score& score, const Real* table_matrix, int vectors, const SideTiles& g) {
    const Index width = g.x.rows;
    if constexpr (Score::has_projection)
      if (g.projected.rows > 0)
        panel_gemm<Store::add>(width, g.projected.rows, vectors,
                               Broadcast<Real>{score.projection().data(), g.projected.rows, 1},
                               g.projected.data, g.projected.lanes, g.x.data, g.x.lanes);
    if constexpr (Score::has_table)
      if (g.table.rows > 0)
        panel_gemm<Store::add>(width, g.table.rows, vectors,
                               Broadcast<Real>{table_matrix, 1, width}, g.table.data, g.table.lanes,
                               g.x.data, g.x.lanes);
  }
};

template <class Op, class Real>
class KeySide {
 public:
  using Score = typename Op::ScoreType;
  using Needs = SideNeeds<Op>;
  static constexpr int kFeatures = Score::key_features;
  static constexpr int kInputs = key_inputs_of<Score>;
  // Inputs of tokens come anew with each call.
  static constexpr bool kMayBeKept =
      kept_features<Score> && kInputs == 0 &&
      (kFeatures > 0 || Score::has_projection || Score::has_transform);

  // inputs: of the keys' tokens, where the score reads them.
  // kept: where features and projected rows are found and kept, or null. Throws std::invalid_argument, its sentence
  // starting with `where`, if those that it has are not of such a call.
  KeySide(const Op& op, const Geometry& g, const StoredView<const Real>& key,
          KeyFeatures<Real>* kept = nullptr, const std::string& where = {},
          const TensorView<const Real>& inputs = {})
      : op_(op),
        g_(g),
        key_(key),
        inputs_(inputs),
        needs_(op, g),
        positions_(op.score, g),
        stride_(g.held_keys()) {
    if constexpr (Needs::any) {
      tables_.resize(std::size_t(g.heads * needs_.table_rows * g.dim_qk));
      if constexpr (Score::has_table)
        for (Index h = 0; h < g.heads; ++h) op.score.prepare_table(h, g.dim_qk, table_data(h));
      if constexpr (kMayBeKept)
        if (kept && key.has_elements()) take_kept(*kept, where);
      if (!kept_) take_own();
    }
  }
  KeySide(const KeySide&) = delete;  // features_ and projected_ refer to its memory

  [[nodiscard]] const Needs& needs() const { return needs_; }
  [[nodiscard]] const PositionTableOf<Score, Real>& positions() const { return positions_; }
  // Are side values read from, and added to, those that a caller keeps? They are then build() ahead of the call.
  [[nodiscard]] bool keeps() const { return kept_ != nullptr; }

  [[nodiscard]] Index bytes() const {
    return Index((own_features_.size() + own_projected_.size() + tables_.size()) * sizeof(Real));
  }

  // May a call of this op on these keys take what is kept?
  [[nodiscard]] static bool fits(const KeyFeatures<Real>& kept, const Op& op, Geometry g,
                                 const StoredView<const Real>& key) {
    if (!kMayBeKept || kept.len_ == 0) return true;
    g.batch = key.shape().batch;
    g.len_kv = 0;  // no features
    return kept.stamp_.difference(KeySide(op, g, key).stamp()).empty();
  }

  // Fills all side values, or those that are not kept yet; constant afterwards.
  void build(int threads) {
    if constexpr (!Needs::any) return;
    const Index first = kept_ ? std::min(kept_->len_, g_.len_kv) : g_.share.keys_before,
                end = g_.held_keys_end();
    if (first >= end) return;
    constexpr Index keys_per_thread = 64;
    threads =
        int(std::min<Index>(threads, 1 + g_.batch * heads() * (end - first) / keys_per_thread));
    const auto take_keys = [&](Scratch<Real>& s) {
      return TileOfRows<Real>(key_, kWidth, !needs_.keys_by_group, s);
    };
    const Index elements = tile_elements(g_.dim_qk) + scratch_elements<Real>(take_keys);
    parallel_for(g_.batch * heads(), threads, [&](Index unit) {
      const Index b = unit / heads(), h = reader(unit % heads());
      Scratch<Real> scratch(elements);
      const SideTiles<Real> tiles = take_tiles(scratch);
      const TileOfRows<Real> keys = take_keys(scratch);
      for (Index j = first, count = 0; j < end; j += count) {
        count = std::min(kWidth - j % kWidth, end - j);  // of one page
        keys.load(b, g_.kv_head(h), j, count);
        build(tiles, keys.view(), b, h, j, count);
      }
    });
    if (kept_) kept_->len_ = g_.len_kv;
  }
  // Fills those of keys [first, first + count), which `keys` holds, as query head h reads them.
  void build(const SideTiles<Real>& tiles, const TensorView<const Real>& keys, Index b, Index h,
             Index first, Index count) {
    if constexpr (!Needs::any) return;
    for (int map = 0; map < Needs::maps; ++map)
      for (Index j = first; j < first + count; j += kWidth)
        build_block(tiles, keys, b, h, map, j, std::min(kWidth, first + count - j));
  }
  // Room for build(); nothing for scores that ask for nothing.
  [[nodiscard]] SideTiles<Real> take_tiles(Scratch<Real>& scratch) const {
    if constexpr (!Needs::any) return {};
    return take_tiles(scratch, g_.dim_qk);
  }
  // Do query heads h and other read the same side values?
  [[nodiscard]] bool shares(Index h, Index other) const { return side_head(h) == side_head(other); }

  // Feature i of keys j, j + 1, ... as query head h reads them.
  [[nodiscard]] const Real* feature(Index b, Index h, int map, int i, Index j) const {
    return features_ + feature_at(b, h, map, i, j);
  }
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
    return ((b * heads() + side_head(h)) * Needs::maps + map) * stride_ + j - g_.share.keys_before;
  }
  [[nodiscard]] Index row_count() const {
    return g_.batch * heads() * Needs::maps * g_.held_keys();
  }

  // Does chain() add to parameters?
  static constexpr bool kReachesParameters =
      (kFeatures > 0 || Score::has_projection || Score::has_transform) &&
      (Needs::key_parameters || Score::has_transform);
  // Adds to grad_key, if it is given, what the gradients of the features (`dfeatures`) and of transformed and projected keys
  // (`drows`), laid out by row(), contribute. What those of features and transforms do is added to `parameters`, and what
  // those of features do to `dinputs`, [row][inputs], where they are given, too.
  void chain(const Real* dfeatures, const Real* drows, const TensorView<Real>& grad_key,
             Score* parameters, Real* dinputs, int threads) {
    if constexpr (kFeatures > 0 || Score::has_projection || Score::has_transform) {
      if (!grad_key.given() && !dinputs && !(kReachesParameters && parameters)) return;
      // Of each batch, side head and map, so that they are added up in one order.
      constexpr Index scalars = Needs::key_parameters ? scalars_of<Score> : 0;
      std::vector<double> dscalars(std::size_t(g_.batch * heads() * Needs::maps * scalars));
      const auto scalars_at = [&](Index b, Index side, Index map) {
        return dscalars.data() + ((b * heads() + side) * Needs::maps + map) * scalars;
      };
      std::vector<Score> dtransform;
      if constexpr (Score::has_transform) {
        Score zeros = op_.score;
        visit_parameters(zeros, [](const char*, auto& param) { param.set_zero(); });
        dtransform.assign(std::size_t(g_.batch * heads() * Needs::maps), zeros);
      }
      const auto transform_at = [&](Index b, Index side, Index map) {
        return Score::has_transform ? dtransform.data() + (b * heads() + side) * Needs::maps + map
                                    : nullptr;
      };
      parallel_for(g_.batch * g_.kv_heads, threads, [&](Index unit) {
        const Index b = unit / g_.kv_heads, kv = unit % g_.kv_heads;
        for (Index side = 0; side < heads(); ++side)
          for (int map = 0; map < Needs::maps; ++map)
            if (op_.normaliser.source(g_, reader(side), map).kv_head == kv)
              chain_head(b, reader(side), map, dfeatures, drows, grad_key, scalars_at(b, side, map),
                         dinputs, transform_at(b, side, map));
      });
      if (parameters) add_in_order(dtransform, *parameters);
      if constexpr (Needs::key_parameters)
        for (Index side = 0; side < heads() && parameters; ++side) {
          std::array<double, std::size_t(scalars)> sums{};
          for (Index b = 0; b < g_.batch; ++b)
            for (Index map = 0; map < Needs::maps; ++map)
              for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += scalars_at(b, side, map)[i];
          chain_scalars(*parameters, reader(side), sums.data());
        }
    }
  }

  // Adds gradients of the parameters, in their order, to `to`.
  static void add_in_order(const std::vector<Score>& gradients, Score& to) {
    std::vector<double> sums;
    for (const Score& gradient : gradients) {
      std::size_t n = 0;
      visit_parameters(gradient, [&](const char*, const auto& param) {
        for (Index i = 0; i < param.size(); ++i, ++n) {
          if (n == sums.size()) sums.push_back(0);
          sums[n] += double(param[i]);
        }
      });
    }
    std::size_t n = 0;
    visit_parameters(to, [&](const char*, auto& param) {
      for (Index i = 0; i < param.size() && n < sums.size(); ++i) param[i] += Real(sums[n++]);
    });
  }

 private:
  static constexpr int kVectors = kPanelVectors;
  static constexpr Index kWidth = kPanelLanes<Real>;

  void take_own() {
    own_features_.resize(std::size_t(row_count() * kFeatures));
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
    kept.reserve(g_.batch * heads() * Needs::maps, g_.len_kv, kFeatures, needs_.row_numbers());
    kept_ = &kept;
    stride_ = kept.room_;
    features_ = kept.features_.data();
    projected_ = kept.projected_.data();
  }
  [[nodiscard]] detail::KeyFeaturesStamp<Real> stamp() const {
    detail::KeyFeaturesStamp<Real> stamp;
    stamp.op = CallStamp::type_name<Op>();
    stamp.keys = {g_.batch, g_.kv_heads, 0, g_.dim_qk};
    stamp.address = MemoryView(key_).address(0);
    stamp.heads = heads();
    for (Index side = 0; side < heads(); ++side)
      for (int map = 0; map < Needs::maps; ++map) {
        const Source source = op_.normaliser.source(g_, reader(side), map);
        for (const Index number : {source.kv_head, source.key_column, source.width})
          stamp.sources.push_back(number);
      }
    if constexpr (Needs::has_categories) stamp.tables.numbers = tables_;
    if constexpr (Score::has_projection) {
      const auto& basis = op_.score.projection();
      stamp.projection.numbers.assign(basis.data(), basis.data() + basis.size());
    }
    if constexpr (requires { op_.score.feature_numbers(); })
      stamp.numbers.numbers = op_.score.feature_numbers();
    const auto add = [&stamp](const char* name, const auto& param) {
      stamp.parameters.push_back({name, {param.data(), param.data() + param.size()}});
    };
    if constexpr (Score::has_transform)
      visit_parameters(op_.score, add);
    else if constexpr (Needs::key_parameters)
      detail::for_each_scalar<Score>(
          [&](const auto& entry, int) { add(entry.name, op_.score.*entry.member); });
    return stamp;
  }

  [[nodiscard]] Index feature_at(Index b, Index h, int map, int i, Index j) const {
    const Index first = g_.share.keys_before;
    return row(b, h, map, first) * kFeatures + i * stride_ + j - first;
  }
  // That have side values of their own; none where no head reads any.
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
  [[nodiscard]] SideTiles<Real> take_tiles(Scratch<Real>& scratch, Index width) const {
    return SideTiles<Real>::take(scratch, width, needs_.rank, needs_.key_table_rows(), kInputs,
                                 kWidth);
  }
  [[nodiscard]] Index tile_elements(Index width) const {
    return scratch_elements<Real>([&](Scratch<Real>& s) { return take_tiles(s, width); });
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
    tiles.transform(op_.score, RowSide::key, h, j, kVectors);
    if constexpr (kInputs > 0)
      pack_lanes(detail::input_row(inputs_, g_, b, h, j), inputs_.strides().row, count, kInputs,
                 tiles.input.data, kWidth);
    tiles.derive(op_.score, table(h), kVectors);
  }

  void build_block(SideTiles<Real> tiles, const TensorView<const Real>& keys, Index b, Index h,
                   int map, Index j, Index count) {
    const Source source = op_.normaliser.source(g_, h, map);
    tiles.x.rows = source.width;
    load(tiles, keys, b, h, source, j, count);
    const auto p = scalars_of_head(h);
    for (int v = 0; v < kVectors && v * kLanes<Real> < count; ++v) {
      Pack<Real> f[std::size_t(kFeatures + 1)];
      detail::features_of<detail::OfKeys>(op_.score, tiles.row(v, j), p, f);
      const Index first = v * kLanes<Real>, lanes = std::min<Index>(kLanes<Real>, count - first);
      for (int i = 0; i < kFeatures; ++i) {
        Real values[kLanes<Real>];
        f[i].store(values);
        std::copy(values, values + lanes, features_ + feature_at(b, h, map, i, j + first));
      }
    }
    Real* rows = row_numbers_at(b, h, map, j);
    if (needs_.transformed > 0)
      unpack_lanes(tiles.x.data, kWidth, count, source.width, rows, needs_.row_numbers());
    if (needs_.rank > 0)
      unpack_lanes(tiles.projected.data, kWidth, count, needs_.rank, rows + needs_.transformed,
                   needs_.row_numbers());
  }

  // What key features read of the parameters of head h, in every lane.
  [[nodiscard]] ScalarsOf<Score, Pack<Real>> scalars_of_head(Index h) const {
    if constexpr (!Needs::key_parameters) return {};
    return detail::lanes_of_scalars<Real>(op_.score, h);
  }

  // Where gradients of the parameters that features and the transform read, and of the tokens' numbers, are added: dscalars,
  // dtransform, dinputs.
  void chain_head(Index b, Index h, int map, const Real* dfeatures, const Real* drows,
                  const TensorView<Real>& grad_key, double* dscalars, Real* dinputs,
                  Score* dtransform) const {
    const Source source = op_.normaliser.source(g_, h, map);
    const auto take_rows = [&](Scratch<Real>& s) {
      return LaneTile<Real>{s.take(kWidth * needs_.transformed), source.width, kWidth};
    };
    Scratch<Real> scratch(2 * (tile_elements(source.width) + scratch_elements<Real>(take_rows)));
    const SideTiles<Real> tiles = take_tiles(scratch, source.width);
    const SideTiles<Real> grads = take_tiles(scratch, source.width);
    const LaneTile<Real> before = take_rows(scratch), work = take_rows(scratch);
    const TensorView<const Real> keys = key_.plain();
    const auto p = scalars_of_head(h);
    for (Index j = g_.share.keys_before, end = g_.held_keys_end(); j < end; j += kWidth) {
      const Index count = std::min(kWidth, end - j), at = row(b, h, map, j);
      const Index numbers = needs_.row_numbers();
      load(tiles, keys, b, h, source, j, count);
      grads.x.fill(Real(0));
      grads.table.fill(Real(0));
      grads.input.fill(Real(0));
      if (needs_.rank > 0)
        pack_lanes(drows + at * numbers + needs_.transformed, numbers, count, needs_.rank,
                   grads.projected.data, kWidth);
      for (int v = 0; v < kVectors; ++v)
        chain_features(tiles, grads, v, dfeatures + at * kFeatures, j, count, p, dscalars);
      if (grad_key.given() || Score::has_transform)
        SideTiles<Real>::chain(op_.score, table(h), kVectors, grads);
      if constexpr (Score::has_transform) {
        pack_lanes(drows + at * numbers, numbers, count, source.width, work.data, kWidth);
        for (int v = 0; v < kVectors; ++v)
          for (Index c = 0; c < source.width; ++c) grads.x.add(c, v, work.load(c, v));
        pack_lanes(keys.row(b, source.kv_head, j) + source.key_column, keys.strides().row, count,
                   source.width, before.data, kWidth);
        SideTiles<Real>::transform_vjp(op_.score, RowSide::key, h, j, count, before, work, grads.x,
                                       *dtransform);
      }
      if (grad_key.given())
        add_unpacked_lanes(grads.x.data, kWidth, count, source.width,
                           grad_key.row(b, source.kv_head, j) + source.key_column,
                           grad_key.strides().row);
      if (dinputs)
        add_unpacked_lanes(grads.input.data, kWidth, count, kInputs, dinputs + at * kInputs,
                           kInputs);
    }
  }

  void chain_features(const SideTiles<Real>& tiles, const SideTiles<Real>& grads, int v,
                      const Real* dfeatures, Index key, Index count,
                      const ScalarsOf<Score, Pack<Real>>& p, double* dscalars) const {
    if constexpr (kFeatures > 0) {
      Pack<Real> f[std::size_t(kFeatures)], df[std::size_t(kFeatures)];
      const Index first = v * kLanes<Real>;
      for (int i = 0; i < kFeatures; ++i) {
        Real lanes[kLanes<Real>] = {};
        for (Index lane = first; lane < std::min<Index>(count, first + kLanes<Real>); ++lane)
          lanes[lane - first] = dfeatures[lane * kFeatures + i];
        df[i] = Pack<Real>::load(lanes);
      }
      detail::features_of<detail::OfKeys>(op_.score, tiles.row(v, key), p, f);
      const auto idle = grads.idle_lanes(df, kFeatures, v);
      ScalarsOf<Score, Pack<Real>> dp{};
      detail::features_vjp<detail::OfKeys>(op_.score, tiles.row(v, key), p, f, df, grads.grad(v),
                                           dp);
      grads.clear_lanes(idle, v);
      if constexpr (Needs::key_parameters)
        for (std::size_t i = 0; i < dp.size(); ++i)
          dscalars[i] += sum_valid_lanes(zero_where(idle, dp[i]), v, count);
    }
  }

  const Op& op_;
  Geometry g_;
  StoredView<const Real> key_;
  TensorView<const Real> inputs_;
  Needs needs_;
  PositionTableOf<Score, Real> positions_;
  KeyFeatures<Real>* kept_ = nullptr;
  Index stride_;  // keys for which an array of features has room
  std::vector<Real> own_features_, own_projected_, tables_;
  Real *features_ = nullptr, *projected_ = nullptr;  // its own, or those that are kept
};

}  // namespace HEED_ABI
}  // namespace heed
