// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the engine and the reference call a readout (plug/readout.hpp), written by hand or given by its formula. The code that
// runs formulas comes with plug/readout_formula.hpp, which whoever writes one includes.

#include <heed/plug/readout.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The calls below for a readout that is a formula; plug/readout_formula.hpp defines it.
template <class Readout, class S>
struct ReadoutFormula;

// True where plug/readout_formula.hpp is included, which defines ReadoutFormula.
template <class Readout, class S>
inline constexpr bool knows_readout_formulas = requires {
  sizeof(ReadoutFormula<Readout, S>);
};

}  // namespace detail

// True if the readout has a vjp() written by hand. One that works on the score's parameters must have it.
template <class Readout, class Real>
concept HasReadoutVjp = Readout::uses_score ||
                        requires(const Readout& readout, const ReadoutPanel<Real>& panel,
                                 Readout& grad) { readout.vjp(panel, grad); };

// True if it has a reference(), written by hand or derived, that takes these arguments.
template <class Readout, class S, class... Score>
concept HasReadoutReference = requires(const Readout& readout, ReadoutContext<S>& context,
                                       const Score&... score) {
  readout.reference(context, score...);
} || (sizeof...(Score) == 0 && detail::knows_readout_formulas<Readout, S> &&
      !HasReadoutVjp<Readout, S>);

// forward(panel), written by hand or derived: mixed rows become output rows. score: the op's, where the readout works on it.
template <class Readout, class Real, class... Score>
void read_out_rows(const Readout& readout, const ReadoutPanel<Real>& panel,
                   const Score&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    readout.forward(panel, score...);
  else
    detail::ReadoutFormula<Readout, Real>::forward(readout, panel);
}
// vjp(panel, grad), written by hand or derived.
template <class Readout, class Real, class... Score>
void read_out_rows_vjp(const Readout& readout, const ReadoutPanel<Real>& panel, Readout& grad,
                       Score&&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    readout.vjp(panel, grad, score...);
  else
    detail::ReadoutFormula<Readout, Real>::vjp(readout, panel, grad);
}
// Scratch lane rows that forward() or vjp() needs.
template <class Real, class Readout, class... Score>
[[nodiscard]] Index readout_work_rows(const Readout& readout, const Geometry& g, bool backward,
                                      const Score&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    return readout.work_rows(g, backward, score...);
  else
    return detail::ReadoutFormula<Readout, Real>::work_rows(readout, g, backward);
}
// Reference: all rows of a call.
template <class Readout, class S, class... Score>
void read_out_long_hand(const Readout& readout, ReadoutContext<S>& context,
                        const Score&... score) {
  if constexpr (requires { readout.reference(context, score...); })
    readout.reference(context, score...);
  else
    detail::ReadoutFormula<Readout, S>::reference(readout, context);
}

}  // namespace HEED_ABI
}  // namespace heed
