// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers that move: packs of numbers with their derivatives along one direction, their tangents, and tiles of them. Code that
// runs on numbers alone and on numbers that move is a template over its tiles, LaneTile or DualLanes. Plane 0 of a tile has the
// numbers, plane 1 their tangents.

#include <heed/autodiff/lane_dual.hpp>
#include <heed/engine/derived_tiles.hpp>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
using DualPack = LaneDual<Pack<Real>, 1>;

template <class Real>
[[nodiscard, gnu::always_inline]] inline DualPack<Real> dual_pack(const Pack<Real>& value,
                                                                  const Pack<Real>& tangent) {
  DualPack<Real> x = DualPack<Real>::template variable<0>(value);
  x.grad[0] = tangent;
  return x;
}
template <class Real, std::size_t n>
[[nodiscard]] std::array<DualPack<Real>, n> dual_packs(const std::array<Pack<Real>, n>& values,
                                                       const std::array<Pack<Real>, n>& tangents) {
  std::array<DualPack<Real>, n> both;
  for (std::size_t i = 0; i < n; ++i) both[i] = dual_pack(values[i], tangents[i]);
  return both;
}
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> tangent_of(const LaneDual<Pack<Real>, 1>& x) {
  return x.moves[0] ? x.grad[0] : Pack<Real>(Real(0));
}

template <class Real>
[[nodiscard, gnu::always_inline]] inline DualPack<Real> zero_where(
    typename Pack<Real>::Mask mask, const LaneDual<Pack<Real>, 1>& x) {
  return dual_pack(zero_where(mask, x.value), zero_where(mask, tangent_of(x)));
}
// The sum in every lane.
template <class Real>
[[nodiscard]] DualPack<Real> valid_sum(const LaneDual<Pack<Real>, 1>& x,
                                       typename Pack<Real>::Mask idle, int v, Index count) {
  const auto sum = [&](const Pack<Real>& of) { return Pack<Real>(valid_sum(of, idle, v, count)); };
  return dual_pack(sum(x.value), sum(tangent_of(x)));
}
// What gradients that all lanes share add to results.
template <class Real>
void add_terms(const LaneDual<Pack<Real>, 1>* terms, Index count, double* sums) {
  for (Index i = 0; i < count; ++i) sums[i] += double(tangent_of(terms[i]).lane(0));
}
// Lanes that are 0 and stay so.
template <class Real>
[[nodiscard]] auto is_zero(const LaneDual<Pack<Real>, 1>& x) {
  return is_zero(x.value) & is_zero(tangent_of(x));
}

template <class Real>
struct DualLanes {
  using P = DualPack<Real>;
  Real *data = nullptr, *tangent_data = nullptr;
  Index rows = 0, lanes = 0;  // as in LaneTile

  static constexpr int planes = 2;
  [[nodiscard]] LaneTile<Real> value() const { return {data, rows, lanes}; }
  [[nodiscard]] LaneTile<Real> tangent() const { return {tangent_data, rows, lanes}; }
  [[nodiscard]] LaneTile<Real> plane(int n) const { return n == 0 ? value() : tangent(); }
  [[nodiscard]] P load(Index r, int v) const {
    return dual_pack(value().load(r, v), tangent().load(r, v));
  }
  void store(Index r, int v, const P& x) const {
    value().store(r, v, x.value);
    tangent().store(r, v, tangent_of(x));
  }
  void add(Index r, int v, const P& x) const {
    value().add(r, v, x.value);
    tangent().add(r, v, tangent_of(x));
  }
  void fill(Real x) const {
    value().fill(x);
    tangent().fill(x);
  }
  [[nodiscard]] const DualLanes& constant() const { return *this; }
  [[nodiscard]] static DualLanes take(Scratch<Real>& scratch, Index rows, Index lanes) {
    return {scratch.take(rows * lanes), scratch.take(rows * lanes), rows, lanes};
  }
};

template <class Real>
using DerivedDuals = DerivedTiles<Real, DualLanes<Real>>;
template <class Real>
using DualRowInPlace = LaneRowInPlace<Real, DualLanes<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
