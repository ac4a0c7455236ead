// SPDX-License-Identifier: Apache-2.0
#pragma once

// A call and a direction in which its inputs and parameters move.

#include "catch.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/engine/jvp.hpp>

#include <cmath>
#include <string>
#include <vector>

namespace heed_test {

using heed::Index;

template <class T>
[[nodiscard]] double product(const std::vector<T>& a, const std::vector<T>& b) {
  double sum = 0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += double(a[n]) * double(b[n]);
  return sum;
}
// sum |a b|, relative to which the error of product(a, b) is measured.
template <class T>
[[nodiscard]] double absolute_product(const std::vector<T>& a, const std::vector<T>& b) {
  double sum = 0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += std::abs(double(a[n]) * double(b[n]));
  return sum;
}

template <class Op>
struct Direction {
  using T = typename Op::Scalar;
  std::vector<T> query, key, value, extra, bias, grad_out, query_inputs, key_inputs;
  Op op;

  Direction(const heed::OpCall<Op>& call, std::uint64_t seed) : op(heed::zeros_like(call.op)) {
    std::uint64_t stream = 0;
    const auto draw = [&](std::size_t count) {
      const heed::CounterRandom random(seed, ++stream);
      std::vector<T> x(count);
      for (std::size_t n = 0; n < count; ++n) x[n] = T(random.normal(n));
      return x;
    };
    query = draw(call.query.size());
    key = draw(call.key.size());
    value = draw(call.value.size());
    extra = draw(call.extra.size());
    bias = draw(std::size_t(heed::element_count(call.mask.bias.shape(), "Direction")));
    grad_out = draw(call.grad_out.size());
    query_inputs = draw(call.query_inputs.size());
    key_inputs = draw(call.key_inputs.size());
    op.visit([&](const char*, auto& param) {
      const std::vector<T> numbers = draw(std::size_t(param.size()));
      for (Index i = 0; i < param.size(); ++i) param[i] = numbers[std::size_t(i)];
    });
  }

  [[nodiscard]] heed::Tangents<T> tangents(const heed::OpCall<Op>& call) const {
    const heed::Geometry& g = call.geometry();
    heed::Tangents<T> d{{query.data(), g.query_shape()},
                        {key.data(), g.key_shape()},
                        {value.data(), g.value_shape()}};
    if (!extra.empty()) d.extra = {extra.data(), call.inputs().extra.shape()};
    const heed::Inputs<T> in = call.inputs();
    if (!query_inputs.empty()) d.query_inputs = {query_inputs.data(), in.query_inputs.shape()};
    if (!key_inputs.empty()) d.key_inputs = {key_inputs.data(), in.key_inputs.shape()};
    if (call.mask.bias.given()) d.bias = {bias.data(), call.mask.bias.shape()};
    return d;
  }
};

template <class T>
struct Moved {
  std::vector<T> out, lse, out_tangent, lse_tangent;
  friend bool operator==(const Moved& a, const Moved& b) {
    return a.out == b.out && a.lse == b.lse && a.out_tangent == b.out_tangent &&
           a.lse_tangent == b.lse_tangent;
  }
};

// Tangents of the results by jvp(), with the numbers saved by an earlier forward(), or without.
template <class Op, class T = typename Op::Scalar>
[[nodiscard]] Moved<T> run_jvp(heed::OpCall<Op>& call, const Direction<Op>& direction, bool saved) {
  const heed::Shape out_shape = call.geometry().out_shape(), lse_shape = call.lse_shape();
  const auto rows = std::size_t(heed::element_count(lse_shape, "run_jvp"));
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const bool lse = Op::NormaliserType::differentiates_lse;
  Moved<T> to;
  to.out.assign(call.out.size(), nan);
  to.out_tangent = to.out;
  to.lse.assign(rows, nan);
  to.lse_tangent.assign(lse ? rows : 0, nan);
  heed::Outputs<T> tangent(to.out_tangent.data(), out_shape);
  if (lse) tangent.lse = {to.lse_tangent.data(), lse_shape};
  const auto d = direction.tangents(call);
  if (saved) {
    call.lse.assign(rows, nan);
    call.forward();
    to.out = call.out;
    to.lse = call.lse;
    heed::jvp(call.op, call.inputs(), call.mask, call.saved,
              heed::StoredView<const T>(call.out.data(), out_shape), d, tangent, &direction.op,
              call.options);
  } else {
    heed::Outputs<T> out(to.out.data(), out_shape);
    out.lse = {to.lse.data(), lse_shape};
    heed::jvp(call.op, call.inputs(), call.mask, d, out, tangent, &direction.op, call.options);
  }
  return to;
}

// |<u, J x> - <J^T u, x>| over the sum of the sizes of their terms, u being call.grad_out and grad_lse.
template <class Op, class T = typename Op::Scalar>
[[nodiscard]] double transpose_gap(heed::OpCall<Op>& call, const Direction<Op>& direction,
                                   const Moved<T>& moved) {
  if (!moved.lse_tangent.empty()) {
    call.grad_lse.resize(moved.lse_tangent.size());
    for (std::size_t n = 0; n < call.grad_lse.size(); ++n)
      call.grad_lse[n] = T(std::sin(1.3 * double(n)));
  }
  call.forward();
  call.backward();
  double forwards = product(call.grad_out, moved.out_tangent), backwards = 0,
         size = absolute_product(call.grad_out, moved.out_tangent);
  forwards += product(call.grad_lse, moved.lse_tangent);
  const auto add = [&](const std::vector<T>& gradient, const std::vector<T>& tangent) {
    REQUIRE(gradient.size() == tangent.size());
    backwards += product(gradient, tangent);
    size += absolute_product(gradient, tangent);
  };
  add(call.grad_query, direction.query);
  add(call.grad_key, direction.key);
  add(call.grad_value, direction.value);
  add(call.grad_extra, direction.extra);
  add(call.grad_bias, direction.bias);
  add(call.grad_query_inputs, direction.query_inputs);
  add(call.grad_key_inputs, direction.key_inputs);
  std::vector<std::vector<T>> tangents;
  direction.op.visit([&](const char*, const auto& param) {
    tangents.emplace_back(param.data(), param.data() + param.size());
  });
  std::size_t next = 0;
  const Op& slopes = call.grad_op;
  slopes.visit([&](const char*, const auto& param) {
    add(std::vector<T>(param.data(), param.data() + param.size()), tangents[next++]);
  });
  return std::abs(forwards - backwards) / size;
}

// The largest distance of two vectors over the largest size in the second.
template <class T>
[[nodiscard]] double distance(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0, size = 1e-300;
  for (std::size_t n = 0; n < a.size(); ++n) {
    if (a[n] == b[n]) continue;  // infinities, too
    const double gap = std::abs(double(a[n]) - double(b[n]));
    if (!(gap <= largest)) largest = gap;
  }
  for (const T& x : b)
    if (std::isfinite(x)) size = std::max(size, std::abs(double(x)));
  return largest / size;
}

// The call moved by `step` times the direction.
template <class Op>
[[nodiscard]] heed::OpCall<Op> shifted(const heed::OpCall<Op>& call, const Direction<Op>& direction,
                                       double step, std::vector<typename Op::Scalar>& bias) {
  using T = typename Op::Scalar;
  heed::OpCall<Op> moved = call;
  const auto move = [&](std::vector<T>& x, const std::vector<T>& d) {
    for (std::size_t n = 0; n < x.size(); ++n) x[n] += T(step) * d[n];
  };
  move(moved.query, direction.query);
  move(moved.key, direction.key);
  move(moved.value, direction.value);
  move(moved.extra, direction.extra);
  move(moved.query_inputs, direction.query_inputs);
  move(moved.key_inputs, direction.key_inputs);
  move(moved.grad_out, direction.grad_out);
  if (call.mask.bias.given()) {
    bias = heed::dense_numbers<T>(call.mask.bias);
    move(bias, direction.bias);
    moved.mask.bias = {bias.data(), call.mask.bias.shape()};
  }
  std::vector<std::vector<T>> tangents;
  direction.op.visit([&](const char*, const auto& param) {
    tangents.emplace_back(param.data(), param.data() + param.size());
  });
  std::size_t next = 0;
  moved.op.visit([&](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) param[i] += T(step) * tangents[next][std::size_t(i)];
    ++next;
  });
  return moved;
}

// (out(x + h d) - out(x - h d)) / 2h
template <class Op, class T = typename Op::Scalar>
[[nodiscard]] std::vector<T> difference_quotient(const heed::OpCall<Op>& call,
                                                 const Direction<Op>& direction, double step) {
  std::vector<T> bias;
  auto there = shifted(call, direction, step, bias);
  there.infer();
  std::vector<T> result = there.out;
  auto back = shifted(call, direction, -step, bias);
  back.infer();
  for (std::size_t n = 0; n < result.size(); ++n)
    result[n] = (result[n] - back.out[n]) / T(2 * step);
  return result;
}

// Forward mode with and without an earlier forward() agree with each other, with backward by the transpose identity, and,
// where a tolerance is given for them, with central differences.
template <class Op>
void check_forward_mode(heed::OpCall<Op> call, double tolerance, double difference_tolerance = 0) {
  const Direction<Op> direction(call, 7);
  const auto saved = run_jvp(call, direction, true), found = run_jvp(call, direction, false);
  CHECK(distance(found.out, saved.out) < tolerance);
  CHECK(distance(found.lse, saved.lse) < tolerance);
  CHECK(distance(found.out_tangent, saved.out_tangent) < 10 * tolerance);
  CHECK(distance(found.lse_tangent, saved.lse_tangent) < 10 * tolerance);
  CHECK(transpose_gap(call, direction, saved) < tolerance);
  if (difference_tolerance > 0)
    CHECK(distance(saved.out_tangent, difference_quotient(call, direction, 1e-5)) <
          difference_tolerance);
}

}  // namespace heed_test
