// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures what a Hessian-vector product costs beside backward() of the same op, on this machine at this moment:
//
//   std::puts(time_hvp(op, geometry, causal<float>()).text().c_str());
//
// prints
//
//   hvp 12.3 ms (minimum 12.1, quartiles 12.2 to 12.5), 3.4 x backward (3.38 to 3.43)
//
// Both run in turns, on the same numbers as in time_op() (check/op_timing.hpp), and the figures are medians as there.

#include <heed/check/op_timing.hpp>
#include <heed/engine/hvp.hpp>

#include <sstream>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct HvpTiming {
  Spread hvp;    // seconds per call
  Spread ratio;  // over backward() of the same op

  [[nodiscard]] std::string text() const {
    std::ostringstream line;
    line.precision(3);
    detail::write_timing(line, "hvp", hvp, ratio, "backward");
    return line.str();
  }
};

// The direction covers all inputs but grad_out, and all parameters; its numbers are those of the
// call itself. All products are written. Throws as forward() does, and unless repeats is positive.
template <class Op>
[[nodiscard]] HvpTiming time_hvp(const Op& op, const Geometry& g,
                                 const Mask<typename Op::Scalar>& mask = {}, int repeats = 9,
                                 const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  require(repeats > 0, "time_hvp: repeats is ", repeats, ", it must be positive");
  require_sizes(g, op.normaliser.query_heads(g.heads), "time_hvp");
  using Real = typename Op::Scalar;
  OpCall<Op> call(op, g, mask, options);
  const Inputs<Real> in = call.inputs();
  Tangents<Real> along{in.query, in.key, in.value};
  along.query_inputs = in.query_inputs;
  along.key_inputs = in.key_inputs;
  std::vector<std::vector<Real>> memory;
  const auto room = [&](const StoredView<const Real>& like) {
    if (!like.given()) return StoredView<Real>();
    memory.emplace_back(std::size_t(element_count(like.shape(), "time_hvp")));
    return StoredView<Real>(memory.back().data(), like.shape());
  };
  Gradients<Real> to{room(in.query), room(in.key), room(in.value)};
  to.query_inputs = room(in.query_inputs);
  to.key_inputs = room(in.key_inputs);
  Op to_op = op;
  std::vector<double> times, ratios;
  call.forward();
  for (int i = 0; i <= repeats; ++i) {
    const double backward = seconds_of([&] { call.backward(); });
    const double product = seconds_of([&] {
      hvp(call.op, in, mask, call.saved, call.out_view(), call.grad_out_view(), along, {}, to,
          &to_op, &call.op, options);
    });
    if (i == 0) continue;  // the first call touches new memory
    times.push_back(product);
    ratios.push_back(product / backward);
  }
  return {spread_of(times), spread_of(ratios)};
}

}  // namespace HEED_ABI
}  // namespace heed
