// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine asks of an op in forward: a small abstract class per part, templates of the scalar alone, so that the engine is
// compiled once for all ops, and a part once for all ops that share it. op_tiles.hpp makes them of any op.
//
//   once per call        traits, validate(), source() of every map, tables
//   once per panel       features() of queries, begin(), finish(), weights() of whole rows, read_out()
//   once per 64 keys     features() of keys, transform()
//   once per tile        scores(), move(), weigh(): all vectors of a panel, with one map of a part of a tile
//   few queries          row_scores(), weigh_row(): once per query and tile
//
// Traits say in numbers what an op's types say at compile time. Loops take those that they need into local constants.

#include <heed/core/dropout.hpp>
#include <heed/engine/derived_tiles.hpp>
#include <heed/engine/key_features.hpp>
#include <heed/engine/positions.hpp>
#include <heed/engine/tile/place.hpp>
#include <heed/plug/column_sums.hpp>
#include <heed/plug/normaliser.hpp>
#include <heed/plug/readout.hpp>
#include <heed/plug/streamed_rows.hpp>
#include <heed/plug/token_inputs.hpp>

#include <memory>
#include <string>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct Saved;

// The members and promises of a score (plug/score.hpp, plug/promises.hpp).
struct ScoreTraits {
  bool plain = false, has_projection = false, has_table = false, has_transform = false;
  bool has_positions = false, counts_visible = false;
  bool table_by_distance = false;  // table rows are those of distances, not of categories of keys
  bool has_vjp = false;            // score_vjp() is written by hand
  bool normed_dots = false, kept_features = false, place_free = false;
  bool one_value_each = true;   // no parameter has a value per head
  bool scalars_differ = false;  // one of p[0], p[1], ... has a value per head
  bool key_features_read_p = false, sums_inputs = false;
  int scalars = 0, query_features = 0, key_features = 0;
  Index query_inputs = 0,
        key_inputs = 0;  // numbers of its token that the row of a query, of a key has
  const char* key_inputs_name = "";

  // Does a score derive anything of rows?
  [[nodiscard]] bool derives() const {
    return query_features > 0 || key_features > 0 || has_projection || has_table || has_transform;
  }
};

// The members and promises of a normaliser (plug/normaliser.hpp, plug/streaming.hpp).
struct NormaliserTraits {
  int maps = 1, diagnostics = 0;
  bool streams = false, needs_weight = false, counts_visible = false, uses_extra = false;
  bool uses_query = false, differentiates_lse = false;
  bool mergeable = false, place_free = false, one_value_each = true;
  Index state_numbers = 1;  // of a row: the sum of its weights, and the normaliser's own
  Index query_inputs = 0, key_inputs = 0;
};

// The members and promises of a readout (plug/readout.hpp).
struct ReadoutTraits {
  bool identity = false, saves_mixed = false, uses_query = false, uses_own_rows = false;
  bool maps_values = false;
  bool uses_extra = false, uses_lse = false, counts_steps = false, rehearses = false;
  bool place_free = false, one_value_each = true;
  int diagnostics = 0;
  Index query_inputs = 0;
};

// What the products of a panel are multiplied by before the score sees them (CallContext in context.hpp).
template <class Real>
struct LogitFactors {
  Real dot = 1;                   // pair.dot over the scaled dot product
  Real keep = 1;                  // pair.logit, before its soft cap, over the scaled dot product
  Real cap = 0, inverse_cap = 0;  // of the soft cap, 0 for none
  Real feature = 1;               // what a pair has of query feature 0 over the feature
  bool dots_are_logits = true;    // pair.logit is the scaled dot product as it is
};

// The pairs of one map of a panel with the keys of a tile.
template <class Real>
struct ScoreTile {
  const TilePlace* place;
  int vectors;
  Index first_query;  // position of lane 0
  LogitFactors<Real> logits;
  const Real* scalars;            // p[0], p[1], ... of the head
  LaneTile<const Real> features;  // [query_features][lanes]
  const Real* key_features;       // of the first key; feature i stands i * key_stride further on
  Index key_stride;
  LaneTile<Real> dots;       // scaled dot products, [keys][lanes]
  LaneTile<Real> projected;  // projected ones; data is null without a projection
  LaneTile<Real> table;      // [table_rows][lanes], or by_lane of relative_rows.hpp
  const PositionTable<Real>* positions;
  LaneTile<Real> scores;  // out; may be `dots`
  Real* running_max;      // [lanes], raised to the scores; null: not asked for
};

// The pairs of one query with the keys of a tile, keys along the lanes.
template <class Real>
struct ScoreRow {
  const TilePlace* place;
  Index lane;  // of the query in its panel
  Index query_position;
  LogitFactors<Real> logits;
  const Real* scalars;
  LaneTile<const Real> features;
  const Real* key_features;
  Index key_stride;
  const Real* projected;  // projected dot products, or null
  LaneTile<Real> table;   // [table_rows][lanes]
  const PositionTable<Real>* positions;
  Real* scores;  // scaled dot products in, scores out; room for whole vectors
};

template <class Real>
struct DualLanes;

// What a score derives of rows and of its parameters, in numbers, or, with DualLanes, in tangents of such numbers along a
// direction of the parameters.
template <class Real, class Lanes = LaneTile<Real>>
class RowFormulas {
 public:
  virtual ~RowFormulas() = default;
  // p[0], p[1], ... of head h.
  virtual void scalars(Index h, Real* p) const = 0;
  virtual void prepare_table(Index h, Index dim, Real* out) const = 0;
  [[nodiscard]] virtual PositionTable<Real> position_table(const Geometry& g) const = 0;
  // Features of rows of head h from position `first` on, [feature][lane]: numbers, and how they move with the rows. visible:
  // keys that each query sees, or null.
  virtual void features(RowSide side, const DerivedTiles<Real, Lanes>& rows, Index h, Index first,
                        const Real* visible, int vectors, const Lanes& out) const = 0;
  // The transformed rows in place of x.
  virtual void transform(RowSide side, Index h, Index first, int vectors, const Lanes& x) const = 0;
};

template <class Real>
class ScoreTiles : public RowFormulas<Real> {
 public:
  ScoreTraits traits;
  const Real* projection = nullptr;  // (dim, rank); null without one
  const ColumnFormula<Real>* columns =
      nullptr;  // of a score whose pairs have sums over columns in place of products

  virtual void validate(const Geometry& g, const char* where) const = 0;
  // Behind validate(), which looks at the shapes of parameters: the projection's rank and the rows of the table, 0 without one,
  // and whether the transform differs by head.
  [[nodiscard]] virtual Index rank() const = 0;
  [[nodiscard]] virtual Index table_rows() const = 0;
  [[nodiscard]] virtual bool transform_differs() const = 0;
  // What key features depend on, beside what the engine knows of the call.
  virtual void stamp(detail::KeyFeaturesStamp<Real>& to) const = 0;
  // summand() of `count` numbers at `stride`, and its slopes if `slopes` is given.
  virtual void summands(const Real* x, Index stride, Index count, double* values,
                        double* slopes) const = 0;
  virtual void scores(const ScoreTile<Real>& tile) const = 0;
  virtual void row_scores(const ScoreRow<Real>& row) const = 0;
};

// States are [number][lanes], of which number 0 is the sum of the weights.
template <class Real>
class NormaliserTiles {
 public:
  NormaliserTraits traits;
  LearntOfOp<Real> learnt;  // keys that belong to it

  virtual ~NormaliserTiles() = default;
  virtual void validate(const Geometry& g, const char* where) const = 0;
  [[nodiscard]] virtual Source source(const Geometry& g, Index h, int map) const = 0;
  [[nodiscard]] virtual Index query_heads(Index heads) const = 0;
  [[nodiscard]] virtual const char* diagnostic_name(int i) const = 0;

  // Asked of streaming normalisers.
  // The states of vector v before the first key.
  virtual void begin(const StreamQueries<Real>&, int, const LaneTile<Real>&) const {}
  // Tells the largest scores of the next tile, [lanes], and rescales the sums; `factors` receives what earlier weights are
  // multiplied by. Returns whether a factor is not 1.
  virtual bool move(const LaneTile<Real>& /*states*/, const Real* /*top*/, Real* /*factors*/,
                    int /*vectors*/) const {
    return false;
  }
  // Scores become weights before finish(), and their sums are added to the states.
  virtual void weigh(const LaneTile<Real>& /*scores*/, const TilePlace&, int /*vectors*/,
                     const LaneTile<Real>& /*states*/) const {}
  // The same of query i, with keys along the lanes.
  virtual void weigh_row(Real* /*scores*/, Index /*keys*/, Index /*i*/,
                         const LaneTile<Real>& /*states*/) const {}
  // Joins `others` into `states`; what both have mixed takes the factors, [lanes].
  virtual void join(const LaneTile<Real>& /*states*/, const LaneTile<Real>& /*others*/,
                    int /*vectors*/, Real* /*factors*/, Real* /*other_factors*/) const {}
  // finish() and lse() of the states, [lanes].
  virtual void finish(const LaneTile<Real>& /*states*/, int /*vectors*/, Real* /*factors*/,
                      Real* /*lse*/) const {}

  // Asked of row normalisers.
  virtual void weights(RowBlock<Real>&) const {}
  [[nodiscard]] virtual Index work_tiles(bool /*backward*/) const { return 0; }
};

template <class Real>
class ReadoutTiles {
 public:
  ReadoutTraits traits;

  virtual ~ReadoutTiles() = default;
  virtual void validate(const Geometry& g, const char* where) const = 0;
  [[nodiscard]] virtual Index extra_dim(const Geometry& g) const = 0;
  [[nodiscard]] virtual const char* extra_name() const = 0;
  [[nodiscard]] virtual Index work_rows(const Geometry& g, bool backward) const = 0;
  [[nodiscard]] virtual Index step_columns(const Geometry& g) const = 0;
  [[nodiscard]] virtual const char* without_steps() const = 0;
  [[nodiscard]] virtual const char* diagnostic_name(int i) const = 0;
  virtual void read_out(const ReadoutPanel<Real>& panel) const = 0;
  // maps_values: x[i] = f(x[i]), slope[i] = f'(x[i]) unless slope is null, for i < n.
  virtual void map_values(Real* x, Real* slope, Index n) const = 0;
  // A readout whose rows depend on each other: what runs first, and the readout that knows what that has reported.
  [[nodiscard]] virtual bool needs_rehearsal() const = 0;
  [[nodiscard]] virtual std::unique_ptr<ReadoutTiles> rehearsal() const = 0;
  [[nodiscard]] virtual std::unique_ptr<ReadoutTiles> settled(const Saved<Real>& reports) const = 0;
};

// Which columns of query_inputs and key_inputs the parts of an op read, and what they call them (plug/token_inputs.hpp).
struct TokenColumns {
  ColumnRange score_query, normaliser_query, readout_query, score_key, normaliser_key;
  std::string (*query_names)() = nullptr;
  std::string (*key_names)() = nullptr;
  [[nodiscard]] Index query() const { return readout_query.end(); }
  [[nodiscard]] Index key() const { return normaliser_key.end(); }
  [[nodiscard]] bool any() const { return query() > 0 || key() > 0; }
};

// An op as the engine sees it. The parts must outlive it.
template <class Real>
struct OpTiles {
  const ScoreTiles<Real>& score;
  const NormaliserTiles<Real>& normaliser;
  const ReadoutTiles<Real>& readout;
  TokenColumns columns;
  std::string_view type;  // of the op, a text of its own for each

  [[nodiscard]] int maps() const { return normaliser.traits.maps; }
  [[nodiscard]] bool streams() const { return normaliser.traits.streams; }
  [[nodiscard]] Index extra_dim(const Geometry& g) const {
    return normaliser.traits.uses_extra ? 1 : readout.extra_dim(g);
  }
  // Width of the rows of query, key and value that normaliser or readout read beside the scores; 0 for none.
  [[nodiscard]] Index own_query_dim(const Geometry& g) const {
    return readout.traits.uses_query || normaliser.traits.uses_query || normaliser.learnt.count > 0
               ? g.dim_qk
               : 0;
  }
  [[nodiscard]] Index own_row_dim(Index dim) const {
    return readout.traits.uses_own_rows ? dim : 0;
  }
  void validate(const Geometry& g, const char* where) const {
    score.validate(g, where);
    normaliser.validate(g, where);
    readout.validate(g, where);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
