// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures what an op costs beside plain attention, on this machine at this moment:
//
//   const OpTiming t = time_op(op, geometry, causal<float>());
//   std::puts(t.text().c_str());
//
// prints
//
//   forward 1.23 ms (minimum 1.2, quartiles 1.21 to 1.3), 1.05 x plain attention (1.03 to 1.08)
//   backward 3.71 ms (minimum 3.6, quartiles 3.66 to 3.8), 1.1 x plain attention (1.09 to 1.12)
//
// Both run in turns on random inputs. 1.23 ms and 1.05 are medians. A ratio compares two runs that
// follow each other, so that it varies less than times do while other programs run. The minimum
// shows best what the machine can do. Cost: 2 (repeats + 1) calls of each.
//
// time_jvp(op, geometry, mask) likewise measures forward mode beside forward() of the same op, with
// the numbers that forward() saves and without them.

#include <heed/check/op_call.hpp>
#include <heed/check/stopwatch.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/plug/check.hpp>

#include <sstream>
#include <string>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

inline void write_timing(std::ostringstream& line, const char* pass, const Spread& time,
                         const Spread& ratio, const char* unit) {
  line << pass << ' ' << time.median * 1e3 << " ms (minimum " << time.minimum * 1e3
       << ", quartiles " << time.lower * 1e3 << " to " << time.upper * 1e3 << "), " << ratio.median
       << " x " << unit << " (" << ratio.lower << " to " << ratio.upper << ')';
}

}  // namespace detail

struct OpTiming {
  Spread forward, backward;              // seconds per call
  Spread forward_ratio, backward_ratio;  // over plain attention of the same sizes and mask

  // A line per pass.
  [[nodiscard]] std::string text() const {
    std::ostringstream lines;
    lines.precision(3);
    detail::write_timing(lines, "forward", forward, forward_ratio, "plain attention");
    lines << '\n';
    detail::write_timing(lines, "backward", backward, backward_ratio, "plain attention");
    return lines.str();
  }
};

struct JvpTiming {
  Spread saved, found;  // seconds per call of jvp(), with what forward() saved and without it
  Spread saved_ratio, found_ratio;  // over forward() of the same op

  // One line with saved numbers, one without.
  [[nodiscard]] std::string text() const {
    std::ostringstream lines;
    lines.precision(3);
    detail::write_timing(lines, "jvp with saved", saved, saved_ratio, "forward");
    lines << '\n';
    detail::write_timing(lines, "jvp without", found, found_ratio, "forward");
    return lines.str();
  }
};

// Throws as forward() does, and unless repeats is positive.
template <class Op>
[[nodiscard]] OpTiming time_op(const Op& op, const Geometry& g,
                               const Mask<typename Op::Scalar>& mask = {}, int repeats = 9,
                               const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  require(repeats > 0, "time_op: repeats is ", repeats, ", it must be positive");
  require_sizes(g, op.normaliser.query_heads(g.heads), "time_op");
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
  return {spread_of(forward), spread_of(backward), spread_of(forward_ratio),
          spread_of(backward_ratio)};
}

// The direction covers query, key, value and all parameters; its numbers are those of the call
// itself. Throws as forward() does, and unless repeats is positive.
template <class Op>
[[nodiscard]] JvpTiming time_jvp(const Op& op, const Geometry& g,
                                 const Mask<typename Op::Scalar>& mask = {}, int repeats = 9,
                                 const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  require(repeats > 0, "time_jvp: repeats is ", repeats, ", it must be positive");
  require_sizes(g, op.normaliser.query_heads(g.heads), "time_jvp");
  using Real = typename Op::Scalar;
  OpCall<Op> call(op, g, mask, options);
  call.forward();
  std::vector<Real> moved(call.out.size()), out(call.out.size());
  const Outputs<Real> tangent(moved.data(), g.out_shape()), to(out.data(), g.out_shape());
  const StoredView<const Real> known(call.out.data(), g.out_shape());
  const Inputs<Real> in = call.inputs();
  const Tangents<Real> along{in.query, in.key, in.value};
  std::vector<double> saved, found, saved_ratio, found_ratio;
  for (int i = 0; i <= repeats; ++i) {
    const double forward = seconds_of([&] { call.forward(); });
    const double with = seconds_of(
        [&] { jvp(call.op, in, mask, call.saved, known, along, tangent, &call.op, options); });
    const double without =
        seconds_of([&] { jvp(call.op, in, mask, along, to, tangent, &call.op, options); });
    if (i == 0) continue;  // the first call touches new memory
    saved.push_back(with);
    found.push_back(without);
    saved_ratio.push_back(with / forward);
    found_ratio.push_back(without / forward);
  }
  return {spread_of(saved), spread_of(found), spread_of(saved_ratio), spread_of(found_ratio)};
}

}  // namespace HEED_ABI
}  // namespace heed
