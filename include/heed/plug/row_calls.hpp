// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the engine and the reference call a row normaliser (plug/normaliser.hpp), written by hand or given by its formula. The
// code that runs formulas comes with plug/row_formula.hpp, which whoever writes one includes.

#include <heed/plug/normaliser.hpp>

#include <concepts>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// True if the normaliser has a vjp() written by hand.
template <class Normaliser, class Real>
concept HasRowVjp = requires(const Normaliser& normaliser, RowBlock<Real>& block,
                             Normaliser& grad) {
  normaliser.vjp(block, grad);
};

namespace detail {

// The calls below for a normaliser that is a formula; plug/row_formula.hpp defines it.
template <class Normaliser, class S>
struct RowFormula;

// True where plug/row_formula.hpp is included, which defines RowFormula.
template <class Normaliser, class S>
inline constexpr bool knows_row_formulas = requires {
  sizeof(RowFormula<Normaliser, S>);
};

template <class Normaliser, class S>
inline constexpr bool has_reference = requires(const Normaliser& n, const LongHandRow<S>& row) {
  { n.reference(row) } -> std::convertible_to<std::vector<S>>;
};

}  // namespace detail

// forward(block) of a row normaliser, written by hand or derived from its formula: block.scores[0] becomes the weights.
template <class Normaliser, class Real>
void normalise_rows(const Normaliser& normaliser, RowBlock<Real>& block) {
  if constexpr (HasRowVjp<Normaliser, Real>)
    normaliser.forward(block);
  else
    detail::RowFormula<Normaliser, Real>::forward(normaliser, block);
}
// vjp(block, grad), written by hand or derived.
template <class Normaliser, class Real>
void normalise_rows_vjp(const Normaliser& normaliser, RowBlock<Real>& block, Normaliser& grad) {
  if constexpr (HasRowVjp<Normaliser, Real>)
    normaliser.vjp(block, grad);
  else
    detail::RowFormula<Normaliser, Real>::vjp(normaliser, block, grad);
}
// Number of scratch tiles of the size of one map that forward() or vjp() needs.
template <class Real, class Normaliser>
[[nodiscard]] Index row_work_tiles(const Normaliser& normaliser, bool backward) {
  if constexpr (HasRowVjp<Normaliser, Real>)
    return normaliser.work_tiles(backward);
  else
    return detail::RowFormula<Normaliser, Real>::work_tiles(normaliser, backward);
}
// Reference: the weights of one row.
template <class Normaliser, class S>
[[nodiscard]] std::vector<S> long_hand_weights(const Normaliser& normaliser,
                                               const LongHandRow<S>& row) {
  if constexpr (requires { normaliser.reference(row); })
    return normaliser.reference(row);
  else
    return detail::RowFormula<Normaliser, S>::reference(normaliser, row);
}

}  // namespace HEED_ABI
}  // namespace heed
