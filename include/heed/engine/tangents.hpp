// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tangents: the direction of a derivative in forward mode. A dot over a number is its derivative along that direction.
// Here stand the tangents of what a score reads of rows, once per call for keys and once per panel for queries:
//
//   transform t(x)   t. = dt/dx x. + dt/dp p.       by dual numbers through transform(); x. below is t. where there is one
//   feature f(x)     f. = sum_c df/dx_c x._c        by the vjp of the feature, seeded with 1
//   projected row    (P^T x). = P^T x.              the projection is fixed
//   table entry      (W x). = W. x + W x.           W. by dual numbers through prepare_table()
//   sum over tokens  (sum term(x_s)). = sum term'(x_s) x._s
//
// Memory  as many numbers per key, map and head as KeySide keeps.

#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/lane_dual.hpp>
#include <heed/engine/op_tiles.hpp>
#include <heed/engine/context.hpp>

#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// A direction in the inputs of a call, each tensor of the shape of the input (bias: of the mask's bias). One that is
// not given does not move. The direction in the op's parameters is an object of the op's type, as their gradients are.
template <class Real>
struct Tangents {
  StoredView<const Real> query = {}, key = {}, value = {}, extra = {}, bias = {}, query_inputs = {},
                         key_inputs = {};
};

namespace detail {

// The same as the engine reads it.
template <class Real>
struct TangentOperands {
  TensorView<const Real> query = {}, key = {}, value = {}, extra = {}, bias = {};
  TensorView<const Real> query_inputs = {},
                         key_inputs = {};  // of the score, sums where it reads sums
  PartInputs<const Real> part_inputs = {};
};

// A number and its tangent.
using Moving = Dual<double, 1>;

[[nodiscard]] inline Moving moving(double value, double tangent) { return {value, {tangent}}; }

// A vector of numbers that move.
template <class Real>
using MovingPack = LaneDual<Pack<Real>, 1>;

template <class Real>
[[nodiscard, gnu::always_inline]] inline MovingPack<Real> moving_pack(const Pack<Real>& value,
                                                                      const Pack<Real>& tangent) {
  MovingPack<Real> x = MovingPack<Real>::template variable<0>(value);
  x.grad[0] = tangent;
  return x;
}
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> tangent_of(const LaneDual<Pack<Real>, 1>& x) {
  return x.moves[0] ? x.grad[0] : Pack<Real>(Real(0));
}

// Gives a number its tangent, the same one in every lane.
inline void set_tangent(Moving& x, double tangent) { x.grad[0] = tangent; }
template <class Real>
void set_tangent(LaneDual<Pack<Real>, 1>& x, double tangent) {
  x = moving_pack(x.value, Pack<Real>(Real(tangent)));
}

// `part` over moving numbers, whose tangents are the learnt parameters of `direction`.
template <class Number = Moving, class Part>
[[nodiscard]] Rebound<Part, Number> moving_part(const Part& part, const Part& direction) {
  Rebound<Part, Number> lifted = cast_part<Number>(part);
  std::vector<double> tangents;
  visit_parameters(direction, [&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) tangents.push_back(double(param[i]));
  });
  std::size_t next = 0;
  visit_parameters(lifted, [&](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) set_tangent(param[i], tangents[next++]);
  });
  return lifted;
}

// Does a part have parameters that move?
template <class Part>
[[nodiscard]] bool moves(const Part& direction) {
  bool any = false;
  visit_parameters(direction, [&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) any = any || param[i] != 0;
  });
  return any;
}

// Throws unless the parameters of `direction` have the shapes of the op's.
template <class Op>
void require_direction(const Op& op, const Op& direction, const std::string& where) {
  std::vector<std::vector<Index>> shapes;
  op.visit([&](const char*, const auto& param) { shapes.push_back(param.shape()); });
  std::size_t next = 0;
  direction.visit([&](const char* name, const auto& param) {
    const std::vector<Index>& wanted = shapes[next++];
    require(param.shape() == wanted, where, ": ", name, " of the op's tangent has shape ",
            extents_text(param.shape()), ", that of the op has ", extents_text(wanted));
  });
}

// Vector v of rows and their tangents, which a transform overwrites; see LaneRowInPlace.
template <class Real>
struct MovingRowInPlace {
  using Scalar = MovingPack<Real>;
  LaneTile<Real> tile, tangent;
  int vector = 0;
  Pack<Real> position = Real(0);
  LaneTile<const Real> before = {}, before_tangent = {};  // the rows that restore() brings back

  [[nodiscard]] Index dim() const { return tile.rows; }
  [[nodiscard]] Scalar operator()(Index c) const {
    return moving_pack(tile.load(c, vector), tangent.load(c, vector));
  }
  void set(Index c, const Scalar& x) const {
    tile.store(c, vector, x.value);
    tangent.store(c, vector, tangent_of<Real>(x));
  }
  [[nodiscard]] Scalar index() const { return Scalar(position); }
  void restore() const {
    for (Index c = 0; c < dim(); ++c)
      set(c, moving_pack(before.load(c, vector), before_tangent.load(c, vector)));
  }
};

// A score whose transform runs on rows that move; nothing for scores without one.
template <class Score, class Real>
class MovingTransform {
  struct Nothing {
    using Type = Nothing;
  };

 public:
  using Lifted = typename std::conditional_t<Score::has_transform, Rebind<Score, MovingPack<Real>>,
                                             Nothing>::Type;

  MovingTransform(const Score& score, const Score& direction) {
    if constexpr (Score::has_transform) {
      score_ = moving_part<MovingPack<Real>>(score, direction);
      moves_ = detail::moves(direction);
    }
  }
  // Do its parameters move, or others of the score?
  [[nodiscard]] bool moves() const { return moves_; }
  [[nodiscard]] const Lifted& score() const { return score_; }
  // The transformed rows and their tangents in place of both, which are rows of head h from `first` on.
  void run(RowSide side, Index h, Index first, int vectors, const LaneTile<Real>& rows,
           const LaneTile<Real>& tangents) const {
    if constexpr (Score::has_transform)
      for (int v = 0; v < vectors; ++v)
        score_.transform(
            side, h,
            MovingRowInPlace<Real>{rows, tangents, v,
                                   Pack<Real>::iota() + Real(first + v * kLanes<Real>)});
  }

 private:
  Lifted score_;
  bool moves_ = false;
};

// Takes what a feature's vjp adds to the gradient of its row times the row's tangent.
template <class Real>
struct AlongRow {
  const SideTiles<Real>& tangent;
  int vector;
  Pack<Real>& sum;

  void add_x(Index c, Pack<Real> g) const { sum += g * tangent.x.load(c, vector); }
  void add_projected(Index c, Pack<Real> g) const { sum += g * tangent.projected.load(c, vector); }
  void add_table(Index m, Pack<Real> g) const { sum += g * tangent.table.load(m, vector); }
  void add_input(Index c, Pack<Real> g) const { sum += g * tangent.input.load(c, vector); }
};

// Numbers of tokens as head h of batch b reads them, or their tangents; zeros where none are given.
struct TokenRange {
  Index batch, head, first, count;
};
template <class Real>
void load_inputs(const TensorView<const Real>& from, const Geometry& g, const TokenRange& tokens,
                 const LaneTile<Real>& to) {
  if (to.rows == 0) return;
  if (!from.given()) return to.fill(Real(0));
  pack_lanes(input_row(from, g, tokens.batch, tokens.head, tokens.first), from.strides().row,
             tokens.count, to.rows, to.data, to.lanes);
}

// Number c of the first of these tokens, and its tangent.
template <class Real>
[[nodiscard]] Moving moving_input(const TensorView<const Real>& inputs,
                                  const TensorView<const Real>& tangents, const Geometry& g,
                                  const TokenRange& token, Index c) {
  const auto number = [&](const TensorView<const Real>& from) {
    return double(input_row(from, g, token.batch, token.head, token.first)[c]);
  };
  return moving(number(inputs), tangents.given() ? number(tangents) : 0.0);
}

// Tangents of what is derived of rows whose tangent is d.x.
template <class Real>
void derive_tangents(const Real* projection, const Real* table, const Real* table_tangent,
                     const SideTiles<Real>& rows, const SideTiles<Real>& d, int vectors) {
  d.derive(projection, table, vectors);
    if (d.table.rows > 0)
      panel_gemm<Store::add>(d.table.rows, d.x.rows, vectors,
                             Broadcast<Real>{table_tangent, d.x.rows, 1}, rows.x.data, rows.x.lanes,
                             d.table.data, d.table.lanes);
}

// Tangents of the features of rows in vector v of `d`, of queries or of keys; p and dp are the head's parameters and theirs.
template <class Side, class Score, class Real>
void feature_tangents(const Score& score, const LaneRow<Real>& row, const SideTiles<Real>& d,
                      const ScalarsOf<Score, Pack<Real>>& p, const ScalarsOf<Score, Pack<Real>>& dp,
                      const Pack<Real>* f, Pack<Real>* tangents) {
  constexpr int count = Side::template count<Score>;
  for (int i = 0; i < count; ++i) {
    Pack<Real> seed[std::size_t(count + 1)];
    for (int n = 0; n < count; ++n) seed[n] = Real(n == i ? 1 : 0);
    tangents[i] = Real(0);
    ScalarsOf<Score, Pack<Real>> slopes{};
    features_vjp<Side>(score, row, p, f, seed, AlongRow<Real>{d, row.vector, tangents[i]}, slopes);
    for (std::size_t n = 0; n < slopes.size(); ++n) tangents[i] += slopes[n] * dp[n];
  }
}

// Of keys, their tables, and the table of positions; and the transform, which queries share.
template <class Op, class Real>
class KeyTangents {
 public:
  using Score = typename Op::ScoreType;
  static constexpr int kFeatures = Score::key_features;

  KeyTangents(const Op& op, const CallContext<Real>& c, const TangentOperands<Real>& d,
              const Op& direction)
      : op_(op),
        c_(c),
        d_(d),
        direction_(direction),
        moved_(positions_of(op.score, direction.score)),
        positions_(ScoreTilesOf<Score, Real>(moved_).position_table(c.geometry)),
        transform_(op.score, direction.score) {
    const SideNeeds<Real>& needs = c.keys.needs();
    if (!needs.any) return;
    const Index rows = c.keys.row_count();
    features_.resize(std::size_t(rows * kFeatures));
    projected_.resize(std::size_t(rows * needs.rank));
    transformed_.resize(std::size_t(rows * needs.transformed));
    if constexpr (Score::has_table) {
      const auto score = moving_part(op.score, direction.score);
      const Index size = table_elements();
      std::vector<Moving> table(std::size_t(size), Moving(0));
      for (Index h = 0; h < c.geometry.heads; ++h) {
        score.prepare_table(h, c.geometry.dim_qk, table.data());
        for (const Moving& entry : table) tables_.push_back(Real(entry.grad[0]));
      }
    }
  }
  KeyTangents(const KeyTangents&) = delete;  // positions_ refers to moved_

  // Fills all of them. The keys' side values must be built.
  void build(int threads) {
    if (!c_.keys.needs().any) return;
    const Geometry& g = c_.geometry;
    constexpr Index width = kPanelLanes<Real>;
    const auto take = [&](Scratch<Real>& s) {
      const auto& needs = c_.keys.needs();
      return SideTiles<Real>::take(s, g.dim_qk, needs.rank, needs.key_table_rows(),
                                   key_inputs_of<Score>, width);
    };
    const Index elements = 2 * scratch_elements<Real>(take);
    parallel_for(g.batch * g.heads, threads, [&](Index unit) {
      const Index b = unit / g.heads, h = unit % g.heads;
      if (h > 0 && c_.keys.shares(h, h - 1)) return;
      Scratch<Real> scratch(elements);
      const SideTiles<Real> rows = take(scratch), d = take(scratch);
      for (int map = 0; map < c_.op.maps(); ++map)
        for (Index j = 0; j < g.len_kv; j += width)
          build_block(rows, d, b, h, map, j, std::min(width, g.len_kv - j));
    });
  }

  // Tangents of feature i of keys j, j + 1, ... as query head h reads them.
  [[nodiscard]] const Real* feature(Index b, Index h, int map, int i, Index j) const {
    return features_.data() + c_.keys.row(b, h, map, 0) * kFeatures + i * c_.geometry.len_kv + j;
  }
  [[nodiscard]] Rows<Real> projected(Index b, Index h, int map, Index j, Index count) const {
    const Index rank = c_.keys.needs().rank;
    return {projected_.data() + c_.keys.row(b, h, map, j) * rank, count, rank, rank};
  }
  // The first `width` columns of keys j, j + 1, ... as they move behind the score's transform.
  [[nodiscard]] Rows<Real> transformed(Index b, Index h, int map, Index j, Index count,
                                       Index width) const {
    const Index row = c_.keys.needs().transformed;
    return {transformed_.data() + c_.keys.row(b, h, map, j) * row, count, width, row};
  }
  // Lane tiles of keys [j, j + count) as head h reads them, behind the transform, and of their tangents.
  void load(const SideTiles<Real>& rows, const SideTiles<Real>& d, Index b, Index h,
            const Source& source, Index j, Index count) const {
    load_rows(c_.key, b, source, j, count, rows.x);
    load_rows(d_.key, b, source, j, count, d.x);
    transform_.run(RowSide::key, h, j, kPanelVectors, rows.x, d.x);
    load_inputs(c_.in.key_inputs, c_.geometry, {b, h, j, count}, rows.input);
    load_inputs(d_.key_inputs, c_.geometry, {b, h, j, count}, d.input);
  }
  // Keys, or their tangents, as they are stored; zeros where none are given.
  static void load_rows(const TensorView<const Real>& from, Index b, const Source& source, Index j,
                        Index count, const LaneTile<Real>& to) {
    if (!from.given()) return to.fill(Real(0));
    pack_lanes(from.row(b, source.kv_head, j) + source.key_column, from.strides().row, count,
               source.width, to.data, to.lanes);
  }
  [[nodiscard]] const MovingTransform<Score, Real>& transform() const { return transform_; }
  [[nodiscard]] const Real* table(Index h) const { return tables_.data() + h * table_elements(); }
  [[nodiscard]] const PositionTable<Real>& positions() const { return positions_; }

 private:
  [[nodiscard]] Index table_elements() const {
    return c_.keys.needs().table_rows * c_.geometry.dim_qk;
  }
  // The score with the tangent of its table of positions in the table's place.
  [[nodiscard]] static Score positions_of(const Score& score, const Score& direction) {
    Score moved = score;
    if constexpr (Score::has_positions) moved.*Score::positions = direction.*Score::positions;
    return moved;
  }

  void build_block(SideTiles<Real> rows, SideTiles<Real> d, Index b, Index h, int map, Index j,
                   Index count) {
    const Source source = op_.normaliser.source(c_.geometry, h, map);
    constexpr int vectors = kPanelVectors;
    rows.x.rows = d.x.rows = source.width;
    load(rows, d, b, h, source, j, count);
    const auto p = lanes_of_scalars<Real>(op_.score, h);
    const auto dp = lanes_of_scalars<Real>(direction_.score, h);
    rows.derive(c_.op.score.projection, c_.keys.table(h), vectors);
    derive_tangents(c_.op.score.projection, c_.keys.table(h), table(h), rows, d, vectors);
    for (int v = 0; v < vectors && v * kLanes<Real> < count; ++v) {
      const LaneRow<Real> row = rows.row(v, j);
      Pack<Real> f[std::size_t(kFeatures + 1)], tangents[std::size_t(kFeatures + 1)];
      features_of<OfKeys>(op_.score, row, p, f);
      feature_tangents<OfKeys>(op_.score, row, d, p, dp, f, tangents);
      const Index first = v * kLanes<Real>, lanes = std::min<Index>(kLanes<Real>, count - first);
      for (int i = 0; i < kFeatures; ++i) {
        Real values[kLanes<Real>];
        tangents[i].store(values);
        std::copy(values, values + lanes,
                  features_.data() + c_.keys.row(b, h, map, 0) * kFeatures +
                      i * c_.geometry.len_kv + j + first);
      }
    }
    const Index rank = c_.keys.needs().rank;
    if (rank > 0)
      unpack_lanes(d.projected.data, d.projected.lanes, count, rank,
                   projected_.data() + c_.keys.row(b, h, map, j) * rank, rank);
    const Index row = c_.keys.needs().transformed;
    if (row > 0)
      unpack_lanes(d.x.data, d.x.lanes, count, source.width,
                   transformed_.data() + c_.keys.row(b, h, map, j) * row, row);
  }

  const Op& op_;
  const CallContext<Real>& c_;
  TangentOperands<Real> d_;
  const Op& direction_;
  std::vector<Real> features_, projected_, transformed_, tables_;
  Score moved_;
  PositionTable<Real> positions_;
  MovingTransform<Score, Real> transform_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
