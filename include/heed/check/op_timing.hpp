// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an op costs beside plain attention, on this machine and in this moment:
//
//   const OpTiming t = time_op(op, geometry, causal<float>());
//   std::puts(t.text().c_str());
//
// Both run in turns on random inputs; medians. Cost: 2 (repeats + 1) calls of each.

#include <heed/check/op_call.hpp>
#include <heed/check/stopwatch.hpp>

#include <sstream>
#include <string>

namespace heed {
inline namespace HEED_ABI {

struct OpTiming {
  double forward = 0, backward = 0;              // seconds per call
  double forward_ratio = 0, backward_ratio = 0;  // over plain attention of the same sizes and mask

  // One line.
  [[nodiscard]] std::string text() const {
    std::ostringstream line;
    line.precision(3);
    line << "forward " << forward * 1e3 << " ms (" << forward_ratio
         << " x plain attention), backward " << backward * 1e3 << " ms (" << backward_ratio
         << " x)";
    return line.str();
  }
};

// Throws as forward() does, and unless repeats is positive.
template <class Op>
[[nodiscard]] OpTiming time_op(const Op& op, const Geometry& g,
                               const Mask<typename Op::Scalar>& mask = {}, int repeats = 9,
                               const Options& options = {}) {
  require(repeats > 0, "time_op: repeats is ", repeats, ", it must be positive");
  Geometry plain_sizes = g;
  plain_sizes.query_heads = g.heads;
  OpCall<Op> mine(op, g, mask, options);
  using Real = typename Op::Scalar;
  using Plain = Attention<Real, DotScore<Real>, Softmax<Real>, Identity<Real>>;
  OpCall<Plain> plain({}, plain_sizes, mask, options);
  std::vector<double> forward, backward, forward_ratio, backward_ratio;
  for (int i = 0; i <= repeats; ++i) {
    const double f = seconds_of([&] { mine.forward(); });
    const double plain_f = seconds_of([&] { plain.forward(); });
    const double b = seconds_of([&] { mine.backward(); });
    const double plain_b = seconds_of([&] { plain.backward(); });
    if (i == 0) continue;  // the first call touches new memory
    forward.push_back(f);
    backward.push_back(b);
    forward_ratio.push_back(f / plain_f);
    backward_ratio.push_back(b / plain_b);
  }
  return {median_of(forward), median_of(backward), median_of(forward_ratio),
          median_of(backward_ratio)};
}

}  // namespace HEED_ABI
}  // namespace heed
