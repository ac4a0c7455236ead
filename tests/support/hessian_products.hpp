// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hessian-vector products of a call, compared with central differences of backward, and checked for symmetry.

#include "catch.hpp"
#include "direction.hpp"

#include <heed/engine/hvp.hpp>

#include <cmath>
#include <limits>
#include <vector>

namespace heed_test {

using heed::OpCall;

template <class T>
struct Product {
  std::vector<T> query, key, value, bias, query_inputs, key_inputs, parameters;

  template <class F>
  static void for_each(F&& f) {
    f("query", &Product::query);
    f("key", &Product::key);
    f("value", &Product::value);
    f("bias", &Product::bias);
    f("query_inputs", &Product::query_inputs);
    f("key_inputs", &Product::key_inputs);
    f("parameters", &Product::parameters);
  }
  friend bool operator==(const Product& a, const Product& b) {
    bool same = true;
    for_each([&](const char*, auto part) { same = same && a.*part == b.*part; });
    return same;
  }
};

template <class Op, class T = typename Op::Scalar>
[[nodiscard]] std::vector<T> parameters_of(const Op& op) {
  std::vector<T> numbers;
  op.visit([&](const char*, const auto& p) {
    numbers.insert(numbers.end(), p.data(), p.data() + p.size());
  });
  return numbers;
}

template <class Op, class T = typename Op::Scalar>
[[nodiscard]] Product<T> run_hvp(OpCall<Op>& call, const Direction<Op>& direction) {
  const heed::Geometry& g = call.geometry();
  call.forward();
  Product<T> to;
  const auto room = [](std::vector<T>& x, const heed::Shape& shape) {
    x.assign(std::size_t(heed::element_count(shape, "run_hvp")),
             std::numeric_limits<T>::quiet_NaN());
    return heed::StoredView<T>(x.data(), shape);
  };
  heed::Gradients<T> views{room(to.query, g.query_shape()), room(to.key, g.key_shape()),
                           room(to.value, g.value_shape())};
  if (call.mask.bias.given()) views.bias = room(to.bias, call.mask.bias.shape());
  const heed::Inputs<T> in = call.inputs();
  if (in.query_inputs.given()) views.query_inputs = room(to.query_inputs, in.query_inputs.shape());
  if (in.key_inputs.given()) views.key_inputs = room(to.key_inputs, in.key_inputs.shape());
  Op to_op = call.op;
  heed::hvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), call.grad_out_view(),
            direction.tangents(call),
            heed::StoredView<const T>(direction.grad_out.data(), g.out_shape()), views, &to_op,
            &direction.op, call.options);
  to.parameters = parameters_of(to_op);
  return to;
}

template <class Op>
[[nodiscard]] Product<double> gradients_at(const OpCall<Op>& call, const Direction<Op>& direction,
                                           double step) {
  std::vector<double> bias;
  auto moved = shifted(call, direction, step, bias);
  moved.forward();
  moved.backward();
  return {moved.grad_query,
          moved.grad_key,
          moved.grad_value,
          moved.grad_bias,
          moved.grad_query_inputs,
          moved.grad_key_inputs,
          parameters_of(moved.grad_op)};
}

template <class Op>
void check_differences(OpCall<Op> call) {
  const Direction<Op> direction(call, 7);
  const auto product = run_hvp(call, direction);
  const double step = 1e-5;
  const auto there = gradients_at(call, direction, step),
             back = gradients_at(call, direction, -step);
  Product<double>::for_each([&](const char* name, auto part) {
    std::vector<double> quotient = there.*part;
    for (std::size_t n = 0; n < quotient.size(); ++n)
      quotient[n] = (quotient[n] - (back.*part)[n]) / (2 * step);
    INFO(name);
    CHECK(distance(product.*part, quotient) < 1e-7);
  });
}

// <b, H a> = <a, H b> for a constant grad_out.
template <class Op, class T = typename Op::Scalar>
void check_symmetry(OpCall<Op> call, double tolerance) {
  Direction<Op> a(call, 7), b(call, 8);
  a.grad_out.assign(a.grad_out.size(), T(0));
  b.grad_out = a.grad_out;
  const auto ha = run_hvp(call, a), hb = run_hvp(call, b);
  double left = 0, right = 0, size = 0;
  const auto add = [&](const std::vector<T>& da, const std::vector<T>& db,
                       const std::vector<T>& of_a, const std::vector<T>& of_b) {
    left += product(db, of_a);
    right += product(da, of_b);
    size += absolute_product(db, of_a) + absolute_product(da, of_b);
  };
  add(a.query, b.query, ha.query, hb.query);
  add(a.key, b.key, ha.key, hb.key);
  add(a.value, b.value, ha.value, hb.value);
  add(a.bias, b.bias, ha.bias, hb.bias);
  add(a.query_inputs, b.query_inputs, ha.query_inputs, hb.query_inputs);
  add(a.key_inputs, b.key_inputs, ha.key_inputs, hb.key_inputs);
  add(parameters_of(a.op), parameters_of(b.op), ha.parameters, hb.parameters);
  CHECK(std::abs(left - right) / size < tolerance);
}

inline const heed::Geometry kHessianSizes{2, 4, 4, 2, 11, 14, 5, 3, 3};

template <class Op>
void check_masks(const Op& op) {
  std::vector<double> bias(4 * 11 * 14);
  for (std::size_t n = 0; n < bias.size(); ++n)
    bias[n] = n % 7 == 3 ? -heed::kInfinity<double> : std::sin(double(n));
  const heed::Mask<double> masks[] = {
      {},
      heed::causal<double>(heed::Align::bottom_right),
      heed::window<double>(3, 1) & heed::soft_cap<double>(2.0),
      heed::key_lengths<double>({10, 0}),
      heed::bias<double>(heed::TensorView<const double>(bias.data(), {1, 4, 11, 14})) &
          heed::causal<double>(),
      heed::bias<double>(heed::TensorView<const double>(bias.data(), {1, 1, 1, 14}))};
  const heed::Options small{.threads = 3, .key_tile = 1, .panel_vectors = 1};
  for (const heed::Mask<double>& mask : masks)
    for (const heed::Options& options : {heed::Options{}, small}) {
      INFO("mask " << &mask - masks << ", key_tile " << options.key_tile);
      check_differences(OpCall<Op>(op, kHessianSizes, mask, options));
      check_symmetry(OpCall<Op>(op, kHessianSizes, mask, options), 1e-12);
    }
  check_differences(
      OpCall<Op>(op, kHessianSizes, heed::causal<double>(), {.dropout = {.rate = 0.3, .seed = 5}}));
}

// Compares every bit of the products.
template <class Op>
void check_threads(OpCall<Op> call) {
  const Direction<Op> direction(call, 7);
  call.options.threads = 1;
  const auto alone = run_hvp(call, direction);
  for (const int threads : {2, 3, 8}) {
    call.options.threads = threads;
    CHECK(run_hvp(call, direction) == alone);
  }
}

}  // namespace heed_test
