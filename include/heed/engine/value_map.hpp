// SPDX-License-Identifier: Apache-2.0
#pragma once

// Values as a readout transforms them (value() in plug/readout.hpp): y = f(x) of each number, in copies that a call makes, and
// the slopes by which gradients and tangents go on: dL/dx = dL/dy f'(x), dy = f'(x) dx.

#include <heed/engine/tiles.hpp>
#include <heed/engine/widened.hpp>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct MappedValues {
  TensorView<Real> values, slopes = {};  // not given where the readout leaves values as they are

  MappedValues(const OpTiles<Real>& op, WidenedTensors<Real>& copies,
               const StoredView<const Real>& from, bool with_slopes) {
    if (!op.readout.traits.maps_values) return;
    values = copies.copy(from);
    if (with_slopes) slopes = copies.copy(from);
    copies.for_rows(values, [&](Real* row, Index b, Index h, Index t) {
      op.readout.map_values(row, with_slopes ? slopes.row(b, h, t) : nullptr, values.shape().dim);
    });
  }
  // x *= f'
  void chain(const WidenedTensors<Real>& copies, const TensorView<Real>& x) const {
    copies.for_rows(x, [&](Real* row, Index b, Index h, Index t) {
      for (Index c = 0; c < slopes.shape().dim; ++c) row[c] *= slopes.row(b, h, t)[c];
    });
  }
};

}  // namespace HEED_ABI
}  // namespace heed
