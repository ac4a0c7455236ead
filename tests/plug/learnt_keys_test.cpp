// SPDX-License-Identifier: Apache-2.0
// Keys that belong to an op: against the reference and difference quotients, with dropout, from caches, in packed sequences,
// and where a query sees no key of the sequence.

#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/kv_cache.hpp>
#include <heed/partial.hpp>
#include <heed/reference/reference.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

template <class T>
struct Registers : Softmax<T> {
  using Mergeable = Registers;
  Param<T> keys, values;
  std::vector<Index> key_shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  std::vector<Index> value_shape(const Geometry& g) const { return {-1, -1, g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{tensor_if_given("keys", &Registers::keys, &Registers::key_shape),
                 tensor_if_given("values", &Registers::values, &Registers::value_shape)};
  static constexpr auto learnt_keys = &Registers::keys;
  static constexpr auto learnt_values = &Registers::values;
};
template <class T>
using Op = Attention<T, DotScore<T>, Registers<T>, Identity<T>>;

template <class T>
Param<T> numbers(std::vector<Index> shape, double by) {
  Param<T> of(std::move(shape));
  for (Index n = 0; n < of.size(); ++n) of[n] = T(std::sin(by * double(n + 1)));
  return of;
}
template <class T>
Op<T> op_of(Index heads, Index count, Index dim_qk, Index dim_v) {
  Op<T> op;
  op.normaliser.keys = numbers<T>({heads, count, dim_qk}, 0.7);
  if (dim_v > 0) op.normaliser.values = numbers<T>({1, count, dim_v}, 1.3);
  return op;
}

}  // namespace

TEST_CASE("learnt keys agree with the reference and difference quotients", "[learnt_keys]") {
  for (const Geometry& g : {Geometry{2, 4, 4, 2, 5, 5, 4, 6}, Geometry{1, 2, 2, 1, 40, 70, 9, 7}})
    for (const Index dim_v : {g.dim_v, Index(0)}) {
      check_passes(op_of<double>(g.heads, 3, g.dim_qk, dim_v), g, 12);
      check_passes(op_of<double>(1, 1, g.dim_qk, dim_v), g, 12);
    }
  // None at all is plain attention.
  const Geometry g{1, 2, 2, 2, 7, 9, 4, 4};
  OpCall<Op<double>> none({}, g, causal<double>());
  OpCall<Attention<double, DotScore<double>, Softmax<double>, Identity<double>>> plain(
      {}, g, causal<double>());
  CHECK(results_of(none).back().values == results_of(plain).back().values);
}

TEST_CASE("calls with learnt keys have the same bits on any number of threads", "[learnt_keys]") {
  const Geometry g{2, 4, 4, 2, 70, 90, 8, 9};
  check_bits_on_threads(OpCall<Op<float>>(op_of<float>(4, 5, 8, 9), g, causal<float>()));
  Options dropping;
  dropping.dropout = {.rate = 0.3, .seed = 5, .first_batch = 0};
  check_bits_on_threads(OpCall<Op<float>>(op_of<float>(4, 5, 8, 9), g, causal<float>(), dropping));
}

TEST_CASE("dropout takes learnt keys for keys", "[learnt_keys]") {
  const Geometry g{1, 2, 2, 1, 21, 35, 6, 5};
  const Op<double> op = op_of<double>(2, 6, 6, 5);
  Options options;
  options.dropout = {.rate = 0.5, .seed = 3, .first_batch = 0};
  OpCall<Op<double>> call(op, g, causal<double>(), options);
  call.forward();
  reference::Problem<double> problem;
  problem.geometry = g;
  problem.query = call.query;
  problem.key = call.key;
  problem.value = call.value;
  problem.mask = causal<double>();
  problem.dropout = options.dropout;
  const auto dropped = reference::forward(op, problem).out;
  problem.dropout = {};
  const auto kept = reference::forward(op, problem).out;
  double most = 0, moved = 0;
  for (std::size_t n = 0; n < dropped.size(); ++n) {
    most = std::max(most, std::abs(call.out[n] - dropped[n]));
    moved = std::max(moved, std::abs(kept[n] - dropped[n]));
  }
  CHECK(most < 1e-12);
  CHECK(moved > 0.1);
}

TEST_CASE("every query sees learnt keys, whatever a mask hides", "[learnt_keys]") {
  const Geometry g{1, 1, 1, 1, 2, 4, 3, 2};
  const Op<double> op = op_of<double>(1, 2, 3, 2);
  OpCall<Op<double>> call(op, g, key_lengths<double>({0}));
  call.forward();
  call.backward();
  for (Index i = 0; i < 2; ++i) {
    double sum = 0, out[2] = {};
    for (Index r = 0; r < 2; ++r) {
      double s = 0;
      for (Index c = 0; c < 3; ++c)
        s += call.query[std::size_t(3 * i + c)] * op.normaliser.keys[3 * r + c] / std::sqrt(3.0);
      sum += std::exp(s);
      for (Index c = 0; c < 2; ++c) out[c] += std::exp(s) * op.normaliser.values[2 * r + c];
    }
    CHECK(call.saved.lse[std::size_t(i)] == Approx(std::log(sum)));
    for (Index c = 0; c < 2; ++c) CHECK(call.out[std::size_t(2 * i + c)] == Approx(out[c] / sum));
  }
  for (const double x : call.grad_key) CHECK(x == 0.0);
  double learnt = 0;
  for (Index n = 0; n < 6; ++n) learnt += std::abs(call.grad_op.normaliser.keys[n]);
  CHECK(learnt > 0.01);
}

TEST_CASE("a cache does not store learnt keys, and its steps see them", "[learnt_keys]") {
  constexpr Index heads = 4, kv_heads = 2, len = 75, d = 8;
  const Op<float> op = op_of<float>(heads, 3, d, d);
  const Geometry g{1, heads, heads, kv_heads, len, len, d, d};
  const auto bottom = causal<float>(Align::bottom_right);
  OpCall<Op<float>> whole(op, g, bottom);
  whole.infer();
  KvCache<float> cache(1, kv_heads, d, d, kPanelLanes<float>);
  std::vector<float> steps(whole.out.size());
  for (const Index count : {40, 1, 3, 1, 30}) {
    const Index done = cache.len();
    const auto part = [&](auto* of, Index h) {
      return TensorView(of + done * d, {1, h, count, d}, {h * len * d, len * d, d});
    };
    cache.append(part(std::as_const(whole.key).data(), kv_heads),
                 part(std::as_const(whole.value).data(), kv_heads));
    forward(op, cache.inputs(part(std::as_const(whole.query).data(), heads)), bottom,
            part(steps.data(), heads));
  }
  CHECK(cache.len() == len);
  for (std::size_t n = 0; n < steps.size(); ++n)
    if (!(std::abs(steps[n] - whole.out[n]) < 2e-6F)) {
      FAIL_CHECK("out[" << n << "] is " << steps[n] << ", of the whole " << whole.out[n]);
      break;
    }
}

TEST_CASE("parts of keys count learnt keys once, with the part that has key 0", "[learnt_keys]") {
  const Geometry g{1, 4, 4, 2, 21, 90, 8, 6};
  const Op<double> op = op_of<double>(4, 3, 8, 6);
  OpCall<Op<double>> whole(op, g, causal<double>(Align::bottom_right));
  whole.infer();
  const auto part = [&](Index begin, Index end) {
    return forward_partial(op, whole.inputs(), whole.mask & key_range<double>(begin, end));
  };
  const Partial<double> merged = merge(merge(part(0, 31), part(31, 32)), part(32, 90));
  for (std::size_t n = 0; n < whole.out.size(); ++n)
    REQUIRE(std::abs(merged.out[n] - whole.out[n]) < 1e-13);

  // One query of so many keys takes parts of them side by side.
  const Geometry many{1, 2, 2, 1, 1, 20000, 4, 4};
  const Op<double> of_many = op_of<double>(2, 3, 4, 4);
  OpCall<Op<double>> call(of_many, many, {}, {.threads = 2});
  call.infer();
  const reference::Result<double> slow = reference::forward(of_many, problem_of<double>(call));
  for (std::size_t n = 0; n < slow.out.size(); ++n)
    CHECK(std::abs(call.out[n] - slow.out[n]) < 1e-12);
}

TEST_CASE("learnt keys that do not fit end in one sentence", "[learnt_keys]") {
  const Geometry g{1, 2, 2, 2, 3, 3, 4, 5};
  const auto said = [&](const Op<double>& op) {
    return message_of([&] {
      OpCall<Op<double>> call(op, g);
      call.forward();
    });
  };
  Op<double> op = op_of<double>(2, 3, 4, 5);
  op.normaliser.values = numbers<double>({2, 2, 5}, 0.1);
  CHECK(said(op).find("there are 3 learnt keys and 2 values of them") != std::string::npos);
  op = op_of<double>(2, 3, 6, 5);
  CHECK(said(op).find("keys has shape (2,3,6), it must be (any,any,4)") != std::string::npos);
  op = op_of<double>(3, 3, 4, 5);
  CHECK(said(op).find("learnt keys are those of 3 heads, the call has 2") != std::string::npos);
}
