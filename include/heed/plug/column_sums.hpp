// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine asks of a score whose pairs are sums over columns (plug/columns.hpp), in place of products.

#include <heed/plug/tile.hpp>

#include <array>

namespace heed {
inline namespace HEED_ABI {

// Lanes, and how they move; no data where nothing moves.
template <class Real>
using ColumnTiles = std::array<LaneTile<Real>, 2>;

// Some queries in lanes with some keys. Plane 0 has numbers, plane 1 how they move; what holds still has no data there.
template <class Real>
struct ColumnPairs {
  ColumnTiles<Real> queries;  // [width][lanes]
  int vectors = 0;
  std::array<const Real*, 2> keys{};  // [keys][width], rows at `strides`
  std::array<Index, 2> strides{};
  Index count = 0, width = 0;
  std::array<const Real*, 2> weights{};  // of the head, [weights][columns]

  // The pairs of some of the keys with some of the vectors.
  [[nodiscard]] ColumnPairs part(Index first, Index keys_of_part, int first_vector,
                                 int vectors_of_part) const {
    ColumnPairs some = *this;
    some.count = keys_of_part;
    some.vectors = vectors_of_part;
    for (std::size_t n = 0; n < 2; ++n) {
      if (queries[n].data) some.queries[n] = queries[n].from_vector(first_vector);
      if (keys[n]) some.keys[n] += first * strides[n];
    }
    return some;
  }
};

// Gradients of such pairs; plane 1 has their tangents.
template <class Real>
struct ColumnBack {
  ColumnTiles<Real> dsums;  // [keys][lanes]
  LaneTile<Real> hidden;    // -infinity where a pair is hidden, else 0; data is null where none is
  ColumnTiles<Real> queries;  // add, [width][lanes]
  ColumnTiles<Real> keys;     // add, [width][keys, and room for W more]
  ColumnTiles<Real> weights;  // add, [weights * columns][lanes]
};

template <class Real>
class ColumnFormula {
 public:
  int numbers = 0, weights_per_column = 0;

  virtual ~ColumnFormula() = default;
  // The learnt weights of the columns of head h, [weights][columns]; null for none.
  [[nodiscard]] virtual const Real* weights(Index h) const = 0;
  // sums[key][lane] = sum over the columns of F
  virtual void sums(const ColumnPairs<Real>& pairs, const LaneTile<Real>& sums) const = 0;
  // The same of one query, a row, with the keys of `pairs`.
  virtual void row_sums(const Real* query, const ColumnPairs<Real>& pairs, Real* sums) const = 0;
  // How the sums move.
  virtual void tangents(const ColumnPairs<Real>& pairs, const LaneTile<Real>& out) const = 0;
  // Adds dsum dF/dx for all x that a column reads. Hidden pairs give nothing, whatever their F is.
  virtual void vjp(const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back) const = 0;
  // The same on numbers that move.
  virtual void vjp_tangents(const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back) const = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
