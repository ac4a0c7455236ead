// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a call of one op compiles: the op as tiles.hpp and vjps.hpp see it, handed to the engine's calls (door.hpp).

#include <heed/engine/door.hpp>
#include <heed/engine/op_vjps.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op>
void Door<Op>::with_tiles(const Op& op, const WithTiles& run) {
  const OpTilesOf<Op> of(op);
  run(of.tiles());
}
template <class Op>
void Door<Op>::with_gradient(const Op& op, Op* grad_op, const WithGradient& run) {
  const OpTilesOf<Op> tiles(op);
  const OpVjpsOf<Op> of(op);
  const OpVjps<Real> vjps = of.vjps();
  if (!grad_op) return run(tiles.tiles(), vjps, nullptr);
  OpGradient<Real> gradient(vjps);
  run(tiles.tiles(), vjps, &gradient);
  *grad_op = OpVjpsOf<Op>::typed(op, gradient);
}

// May a call of the op on these keys take the features that are kept?
template <class Op, class Real = typename Op::Scalar>
[[nodiscard]] bool key_features_fit(const KeyFeatures<Real>& kept, const Op& op, const Geometry& g,
                                    const StoredView<const Real>& key) {
  bool fit = false;
  Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
    fit = Driver<Real>::features_fit(kept, tiles, g, key);
  });
  return fit;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
