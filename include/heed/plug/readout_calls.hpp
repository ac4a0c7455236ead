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
    requires(const Readout& readout, const ReadoutPanel<Real>& panel, Readout& grad) {
  readout.vjp(panel, grad);
};

// The calls themselves. score: the op's, where the readout works on it; in vjp its gradient comes behind it.
template <class Readout, class Real, class... Score>
void read_out_rows(const Readout& readout, const ReadoutPanel<Real>& panel, const Score&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    readout.forward(panel, score...);
  else
    detail::ReadoutFormula<Readout, Real>::forward(readout, panel);
}
template <class Readout, class Real, class... Score>
void read_out_rows_vjp(const Readout& readout, const ReadoutPanel<Real>& panel, Readout& grad,
                       Score&&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    readout.vjp(panel, grad, score...);
  else
    detail::ReadoutFormula<Readout, Real>::vjp(readout, panel, grad);
}
template <class Real, class Readout, class... Score>
[[nodiscard]] Index readout_work_rows(const Readout& readout, const Geometry& g, bool backward,
                                      const Score&... score) {
  if constexpr (HasReadoutVjp<Readout, Real>)
    return readout.work_rows(g, backward, score...);
  else
    return detail::ReadoutFormula<Readout, Real>::work_rows(readout, g, backward);
}

}  // namespace HEED_ABI
}  // namespace heed
