// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine asks of an op in backward, beside what it asks in forward (tiles.hpp): the vector-Jacobian products of its
// parts. op_vjps.hpp makes them of any op.
//
//   once per worker      gradient()
//   once per panel       features_vjp() of queries, transform_vjp(), vjp() of states or of whole rows, read_out_vjp()
//   once per 64 keys     features_vjp() of keys, transform_vjp()
//   once per tile        scores_vjp(), weigh_vjp()

#include <heed/engine/tile/dropout.hpp>
#include <heed/engine/tiles.hpp>

#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Gradients of the parameters of one part, in an object of the part's own type, which the part alone knows.
template <class Real>
class PartGradient {
 public:
  virtual ~PartGradient() = default;
  virtual void set_zero() = 0;
  [[nodiscard]] virtual Index numbers() const = 0;
  // Adds the numbers to sums[0], sums[1], ..., in the order in which the part names its parameters; and the other way.
  virtual void add_to(double* sums) const = 0;
  virtual void add_from(const double* sums) = 0;
  // NaN in those that head h of `heads` has a value of, and in those that all heads share.
  virtual void make_nan(Index h, Index heads) = 0;
};

// A tile on its way back, beside what ScoreTile says of it. With g = dL/dscore of a pair and d.x = g dscore/dx from the score:
//
//   dL/d(scaled dot) = d.dot factor + d.logit (1 - (logit/cap)^2) factor      the second factor of a soft cap only
//   dL/d(query feature), dL/d(scalar) += d.query, dp                          summed over the keys of the tile
//   dL/d(key feature)    = d.key                                              summed over the queries, behind the tile
//   dL/d(projected dot)  = d.projected,    dL/d(table entry) += d.table
//   dL/d(entry of the table of positions) += d.position
//
// Tiles are [keys][lanes] each, unless another shape is said.
template <class Real>
struct ScoreBack {
  LaneTile<Real> dscores;     // in: dL/dscore; out: dL/d(q.k), over CallContext::row_factor()
  LaneTile<Real> dprojected;  // out; data is null without a projection
  LaneTile<Real> hidden;  // -infinity where a pair is hidden, else 0; data is null where none is
  Real* key_lanes;  // out, [key_features][keys][W]: gradients of key features, lanes not yet summed
  LaneTile<Real> dfeatures, dscalars;  // add, [query_features][lanes], [scalars][lanes]
  LaneTile<Real> dtable;               // add, shaped as ScoreTile::table
  PositionSums<Real>* positions;       // add
  Real logit_part;                     // what dL/dlogit counts in dL/d(q.k)
};

// The way back through what a score derives of rows, on numbers, or, with DualLanes, on numbers that move.
template <class Real, class Lanes = LaneTile<Real>>
class RowVjps {
 public:
  // Where a score with columns has the gradient of the weights of head h.
  Real* (*column_weights)(PartGradient<Real>&, Index h) = nullptr;

  virtual ~RowVjps() = default;
  // To what transform_vjp() adds; with DualLanes add_to() gives the tangents of the gradients, and scores without a transform
  // have none.
  [[nodiscard]] virtual std::unique_ptr<PartGradient<Real>> gradient() const = 0;
  // Adds dfeatures . dfeatures/drow to grads.x and so on, and what they owe to p to dscalars, [scalar][lane]; `features` are
  // what ScoreTiles::features() made of the same rows. Lanes that no pair has read may hold anything, and get 0.
  virtual void features_vjp(RowSide side, const DerivedTiles<Real, Lanes>& rows, Index h,
                            Index first, const Real* visible, int vectors,
                            const LaneTile<Real>& features, const Lanes& dfeatures,
                            const DerivedTiles<Real, Lanes>& grads,
                            const Lanes& dscalars) const = 0;
  // d, the gradients of transformed rows, become those of `before`, of which the first `count` exist. `work` has room for them.
  virtual void transform_vjp(RowSide side, Index h, Index first, Index count, const Lanes& before,
                             const Lanes& work, const Lanes& d, PartGradient<Real>& grad) const = 0;
  // Adds sums for p[0], p[1], ... of head h to the gradient of a score.
  virtual void add_scalars(Index h, const double* sums, PartGradient<Real>& grad) const = 0;
};

template <class Real>
class ScoreVjps : public RowVjps<Real> {
 public:
  // Returns how many of the key features have gradients: the first ones. Hidden pairs contribute nothing.
  [[nodiscard]] virtual int scores_vjp(const ScoreTile<Real>& tile,
                                       const ScoreBack<Real>& back) const = 0;
  virtual void table_vjp(Index h, Index dim, const double* dtable,
                         PartGradient<Real>& grad) const = 0;
  // Adds sums for the entries of head h's table of positions.
  virtual void add_positions(Index h, const double* sums, PartGradient<Real>& grad) const = 0;
};

template <class Real>
class NormaliserVjps {
 public:
  // Where a normaliser with learnt keys has their gradients.
  LearntRows<Real> (*learnt)(PartGradient<Real>&, Index h) = nullptr;

  virtual ~NormaliserVjps() = default;
  [[nodiscard]] virtual std::unique_ptr<PartGradient<Real>> gradient() const = 0;

  // Asked of streaming normalisers. Adds what delta, [lanes], makes of the parameters and of the queries' tokens.
  virtual void vjp(const StreamQueries<Real>&, int /*v*/, const LaneTile<Real>& /*states*/,
                   const Real* /*delta*/, PartGradient<Real>&) const {}
  // Scores become weights, x (X = V dmixed^T) becomes dscores:
  //   weight = weight(state, score) finish(state)     dscore = dscore(state, score, weight, X, delta)
  // and both are 0 where the pair is hidden. With dropout, drop(): weight -> drop(weight) in what is summed into dV,
  // X -> drop(X).
  virtual void weigh_vjp(const LaneTile<Real>& /*scores*/, const LaneTile<Real>& /*x*/,
                         const TilePlace&, int /*vectors*/, const LaneTile<Real>& /*states*/,
                         const Real* /*delta*/, const detail::PanelDropout<Real>&) const {}

  // Asked of row normalisers.
  virtual void weights_vjp(RowBlock<Real>&, PartGradient<Real>&) const {}
};

template <class Real>
class ReadoutVjps {
 public:
  virtual ~ReadoutVjps() = default;
  [[nodiscard]] virtual std::unique_ptr<PartGradient<Real>> gradient() const = 0;
  virtual void read_out_vjp(const ReadoutPanel<Real>& panel, PartGradient<Real>& grad,
                            PartGradient<Real>& score_grad) const = 0;
  // As ReadoutTiles::settled().
  [[nodiscard]] virtual std::unique_ptr<ReadoutVjps> settled(const Saved<Real>& reports) const = 0;
};

// An op on its way back. The parts must outlive it.
template <class Real>
struct OpVjps {
  const ScoreVjps<Real>& score;
  const NormaliserVjps<Real>& normaliser;
  const ReadoutVjps<Real>& readout;
};

// Gradients of all parameters, in the order in which an op visits them.
template <class Real>
struct OpGradient {
  std::unique_ptr<PartGradient<Real>> score, normaliser, readout;

  explicit OpGradient(const OpVjps<Real>& op)
      : score(op.score.gradient()),
        normaliser(op.normaliser.gradient()),
        readout(op.readout.gradient()) {}
  void set_zero() {
    for (auto* part : {&score, &normaliser, &readout}) (*part)->set_zero();
  }
  [[nodiscard]] Index numbers() const {
    return score->numbers() + normaliser->numbers() + readout->numbers();
  }
  void add_to(double* sums) const {
    for (const auto* part : {&score, &normaliser, &readout}) {
      (*part)->add_to(sums);
      sums += (*part)->numbers();
    }
  }
  void add_from(const double* sums) {
    for (auto* part : {&score, &normaliser, &readout}) {
      (*part)->add_from(sums);
      sums += (*part)->numbers();
    }
  }
};

}  // namespace HEED_ABI
}  // namespace heed
