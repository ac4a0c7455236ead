// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of mixed precision: operands of a tile are rounded to bfloat16 and paired along what a product sums over,
// sums are floats. What a product reads again and again is paired once: keys and values by the worker, for all panels
// of its group; rows of queries and of the output's gradient by the panel.
//
//   product              pairs along    of the tile                  of the panel
//   S = K Q^T            dim_qk         K, by columns                Q
//   O += V^T P           keys           V, by rows                   P
//   X = V dO^T           dim_v          V, by columns                dO
//   dQ += K^T dS         keys           K, by rows                   dS
//   dK += dS Q           queries        dS, by columns               Q
//   dV += P dO           queries        P, by columns                dO
//
// What is hidden gives nothing, whatever it holds, as in products.hpp. "Not finite" is what is not finite as a
// bfloat16: floats above 2^128 (1 - 2^-9) count as infinite.

#include <heed/core/geometry.hpp>
#include <heed/engine/tile/products.hpp>
#include <heed/plug/normaliser.hpp>
#include <heed/simd/precision.hpp>
#include <heed/simd/scratch.hpp>

#include <array>

namespace heed {
inline namespace HEED_ABI {

// Uninitialised room for `count` pairs where there are products of pairs, else null. Only floats are mixed with bfloat16.
template <class Real>
[[nodiscard]] BfloatPair* take_pairs(Scratch<Real>& scratch, const PairProducts* products,
                                     Index count) {
  if constexpr (std::is_same_v<Real, float>)
    return products ? reinterpret_cast<BfloatPair*>(scratch.take(count)) : nullptr;
  else
    return nullptr;
}

// Rows of keys or values as pairs, kept until those of others are asked for.
class PairedRows {
 public:
  PairedRows() = default;
  PairedRows(const PairProducts* products, BfloatPair* memory)
      : products_(products), memory_(memory) {}

  // The rows have changed.
  void forget() { of_ = {}; }

  // [count][pairs_of(columns)]
  [[nodiscard]] const BfloatPair* by_columns(const Rows<float>& rows) {
    if (!holds(rows))
      products_->by_columns(rows.data, rows.stride, rows.count, rows.columns, memory_,
                            pairs_of(rows.columns));
    of_ = rows;
    return memory_;
  }
  // [pairs_of(count)][columns]
  [[nodiscard]] const BfloatPair* by_rows(const Rows<float>& rows) {
    if (!holds(rows)) {
      products_->by_rows(rows.data, rows.stride, rows.count, rows.columns, memory_, rows.columns);
      finite_ = Finite::unknown;
    }
    of_ = rows;
    return memory_;
  }
  // Are all numbers of the pairs by rows finite?
  [[nodiscard]] bool finite(const Rows<float>& rows) {
    const BfloatPair* pairs = by_rows(rows);
    if (finite_ == Finite::unknown)
      finite_ = products_->finite(pairs, rows.columns, pairs_of(rows.count), rows.columns)
                    ? Finite::yes
                    : Finite::no;
    return finite_ == Finite::yes;
  }
  // The same with zeros in place of those that are not; the caller forgets them.
  [[nodiscard]] const BfloatPair* cleared(const Rows<float>& rows) {
    (void)by_rows(rows);
    products_->clear(memory_, rows.columns, pairs_of(rows.count), rows.columns);
    return memory_;
  }

 private:
  enum class Finite : unsigned char { unknown, yes, no };

  [[nodiscard]] bool holds(const Rows<float>& rows) const {
    return of_.data == rows.data && of_.count == rows.count && of_.columns == rows.columns &&
           of_.stride == rows.stride;
  }
  const PairProducts* products_ = nullptr;
  BfloatPair* memory_ = nullptr;
  Rows<float> of_;
  Finite finite_ = Finite::unknown;
};

// What a worker has in pairs of the tile at hand.
struct Bf16Tile {
  const PairProducts* products;                             // null where nothing is mixed
  std::array<PairedRows, kMostMaps> key_columns, key_rows;  // per score map
  PairedRows value_columns, value_rows;
  BfloatPair* weights;  // [pairs_of(tile)][lanes]: of the panel at hand, by rows

  // backward: which products there will be.
  template <class Real>
  Bf16Tile(const PairProducts* pair_products, const Geometry& g, Index tile, Index lanes, int maps,
           bool backward, Scratch<Real>& scratch)
      : products(pair_products) {
    const auto by_columns = [&](Index columns) {
      return PairedRows(products, take_pairs(scratch, products, tile * pairs_of(columns)));
    };
    const auto by_rows = [&](Index columns) {
      return PairedRows(products, take_pairs(scratch, products, pairs_of(tile) * columns));
    };
    for (std::size_t m = 0; m < std::size_t(maps); ++m) {
      key_columns[m] = by_columns(g.dim_qk);
      if (backward) key_rows[m] = by_rows(g.dim_qk);
    }
    if (backward)
      value_columns = by_columns(g.dim_v);
    else
      value_rows = by_rows(g.dim_v);
    weights = take_pairs(scratch, products, pairs_of(tile) * lanes);
  }

  // Other rows stand where the last ones did.
  void forget() {
    for (auto* pairs : {&key_columns, &key_rows})
      for (PairedRows& rows : *pairs) rows.forget();
    value_columns.forget();
    value_rows.forget();
  }

  // out[key][lane] = rows[key] . lanes; `lanes` holds pairs [pairs_of(columns)][out.lanes]. `running_max`, if given, is
  // raised.
  void dots(PairedRows& pairs, const Rows<float>& rows, const BfloatPair* lanes, int vectors,
            const LaneTile<float>& out, float* running_max = nullptr) const {
    const Index depth = pairs_of(rows.columns);
    products->panel(running_max ? Store::overwrite_and_max : Store::overwrite, rows.count, depth,
                    vectors, {pairs.by_columns(rows), depth, 1}, lanes, out.lanes, out.data,
                    out.lanes, running_max, nullptr);
  }

  // out[column][lane] += sum over keys of rows[key][column] * of[key][lane]. hidden, if it has rows: -infinity where a
  // pair is hidden, else 0; the rows may then hold anything.
  void add_lane_product(PairedRows& pairs, const Rows<float>& rows, const LaneTile<float>& of,
                        const LaneTile<float>& hidden, int vectors,
                        const LaneTile<float>& out) const {
    const bool guarded = hidden.rows > 0;
    const BfloatPair* a = guarded ? pairs.cleared(rows) : pairs.by_rows(rows);
    products->by_rows(of.data, of.lanes, of.rows, of.lanes, weights, of.lanes);
    products->panel(Store::add, rows.columns, pairs_of(rows.count), vectors, {a, 1, rows.columns},
                    weights, of.lanes, out.data, out.lanes, nullptr, nullptr);
    if (!guarded) return;
    add_visible_lanes(rows, of, hidden, vectors, out, [](auto x) { return rounded_to_bfloat(x); });
    pairs.forget();
  }
};

}  // namespace HEED_ABI
}  // namespace heed
