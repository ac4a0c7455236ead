// SPDX-License-Identifier: Apache-2.0
#pragma once

// An op of any type as calls take it that several processes share: code that shares a call is compiled once for all ops.

#include <heed/core/digest.hpp>
#include <heed/core/type_text.hpp>
#include <heed/engine/op_door.hpp>

#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The parts must outlive it.
template <class Real>
struct SharedOp {
  OpTiles<Real> tiles;
  OpVjps<Real> vjps;
  std::string type;   // its name for error texts
  Digest parameters;  // of all their numbers
};

// Results of forward() that backward() needs, for each piece of the queries that a process has.
template <class Real>
struct SavedPieces {
  std::vector<Saved<Real>> pieces;
};

namespace detail {

// run(shared, gradient): what is added to `gradient` goes to `grad_op`. Without a grad_op the gradient is null.
template <class Op, class Run>
void share_op(const Op& op, std::type_identity_t<Op>* grad_op, Run&& run) {
  using Real = typename Op::Scalar;
  Digest parameters;
  op.visit([&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) parameters.add(param[i]);
  });
  Door<Op>::with_gradient(
      op, grad_op,
      [&](const OpTiles<Real>& tiles, const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
        run(SharedOp<Real>{tiles, vjps, type_text<Op>(), parameters}, gradient);
      });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
