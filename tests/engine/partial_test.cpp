// SPDX-License-Identifier: Apache-2.0
// Calls on parts of the keys: merging them, their backward pass, and decoding that splits the keys
// of few queries by itself.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/explain.hpp>
#include <heed/kv_cache.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

template <class Real>
[[nodiscard]] double distance(const std::vector<Real>& a, const std::vector<Real>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t n = 0; n < a.size(); ++n)
    if (a[n] != b[n]) largest = std::max(largest, std::abs(double(a[n]) - double(b[n])));
  return largest;
}

template <class Op>
[[nodiscard]] Partial<double> part_of(OpCall<Op>& call, const Mask<double>& mask, Index begin,
                                      Index end) {
  return forward_partial(call.op, call.inputs(), mask & key_range<double>(begin, end));
}

template <class Op>
void check_parts(const Op& op, const Mask<double>& mask) {
  const Geometry g{2, 4, 4, 2, 23, 61, 6, 5};
  OpCall<Op> call(op, g, mask);
  call.lse.assign(std::size_t(g.query_rows()), 0);
  call.forward();
  const Partial<double> a = part_of(call, mask, 0, 17), b = part_of(call, mask, 17, 18),
                        c = part_of(call, mask, 18, 61);
  const Partial<double> whole = merge(merge(a, b), c), other = merge(a, merge(c, b));
  for (const Partial<double>& merged : {whole, other}) {
    CHECK(distance(merged.out, call.out) < 1e-14);
    CHECK(distance(merged.lse, call.lse) < 1e-14);
  }
  const Partial<double> none(a.shape);
  CHECK(distance(merge(a, none).out, a.out) < 1e-15);
  CHECK(merge(none, a).lse == a.lse);
  CHECK(merge(none, none).lse == none.lse);
}

}  // namespace

TEST_CASE("Parts of the keys merge to the whole", "[engine]") {
  for (const Mask<double>& mask :
       {Mask<double>{}, causal<double>(), window<double>(3, 1), key_lengths<double>({20, 0})}) {
    check_parts(ScaledDot<double>{}, mask);
    check_parts(Dar<double>{}, mask);
  }
}

TEST_CASE("Gradients go back through a merge", "[engine]") {
  const Geometry g{1, 2, 2, 1, 9, 31, 6, 5};
  const Mask<double> mask = causal<double>(Align::bottom_right);
  OpCall<Dar<double>> call({}, g, mask);
  call.grad_lse.resize(std::size_t(g.query_rows()));
  for (std::size_t n = 0; n < call.grad_lse.size(); ++n)
    call.grad_lse[n] = 0.3 * double(n % 5) - 0.7;
  call.forward();
  call.backward();

  std::vector<Mask<double>> masks;
  std::vector<Saved<double>> saved(2);
  std::vector<Partial<double>> parts;
  const Index border = 11;
  for (std::size_t n = 0; n < 2; ++n) {
    masks.push_back(mask & key_range<double>(n == 0 ? 0 : border, n == 0 ? border : g.len_kv));
    parts.push_back(forward_partial(call.op, call.inputs(), masks[n], &saved[n]));
  }
  Partial<double> grad(parts[0].shape);
  grad.out = call.grad_out;
  grad.lse = call.grad_lse;
  const auto [of_a, of_b] = merge_backward(parts[0], parts[1], merge(parts[0], parts[1]), grad);
  std::vector<double> dquery(call.grad_query.size()), dkey(call.grad_key.size()),
      dvalue(call.grad_value.size());
  double dstrength = 0;
  for (std::size_t n = 0; n < 2; ++n) {
    OpCall<Dar<double>> own({}, g, masks[n]);
    own.forward();
    Dar<double> grad_op;
    own.backward();
    backward(own.op, own.inputs(), masks[n], saved[n], own.out_view(),
             (n == 0 ? of_a : of_b).gradients(),
             {{own.grad_query.data(), g.query_shape()},
              {own.grad_key.data(), g.key_shape()},
              {own.grad_value.data(), g.value_shape()}},
             &grad_op);
    const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    };
    add(dquery, own.grad_query);
    add(dkey, own.grad_key);
    add(dvalue, own.grad_value);
    dstrength += grad_op.score.strength[0];
  }
  CHECK(distance(dquery, call.grad_query) < 1e-13);
  CHECK(distance(dkey, call.grad_key) < 1e-13);
  CHECK(distance(dvalue, call.grad_value) < 1e-13);
  CHECK(dstrength == Approx(call.grad_op.score.strength[0]).epsilon(1e-12));
}

// s log n (q . k), n the number of keys that the query sees.
template <class T>
struct Scalable {
  using Features = LogVisible;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.query[0] * pair.logit;
  }
};

TEST_CASE("An op whose scores count visible keys has no parts", "[engine]") {
  CHECK(detail::parts_merge<Dar<double>>);
  CHECK_FALSE(detail::parts_merge<OwnAttention<Scalable, double>>);
}

TEST_CASE("Parts that do not fit are refused", "[engine]") {
  const Partial<float> a(Shape{1, 2, 3, 4}), b(Shape{1, 2, 3, 5});
  CHECK(message_of([&] { (void)merge(a, b); }) ==
        "heed::merge: the parts have shapes (1,2,3,4) and (1,2,3,5), they must be the same");
  CHECK(message_of([] {
          Partial<float>(Shape{1, -2, 3, 4});
        }) == "Partial: the shape is (1,-2,3,4), extents must not be negative");
  Partial<float> cut = a;
  cut.out.resize(5);
  const std::string held =
      "a part of shape (1,2,3,4) holds 5 numbers of out and 6 of lse, it needs 24 and 6";
  CHECK(message_of([&] { (void)merge(a, cut); }) == "heed::merge: " + held);
  CHECK(message_of([&] { (void)merge_backward(a, a, a, cut); }) == "heed::merge_backward: " + held);
  const float x[8]{};
  const Inputs<float> in{{x, {1, 1, 2, 4}}, {x, {1, 1, 2, 4}}, {x, {1, 1, 2, 4}}};
  CHECK(message_of([&] { forward(ScaledDot<float>{}, in, {}, StoredView<float>{}); }) ==
        "heed::forward: out was not given, it must have shape (1,1,2,4)");
  OpCall<ScaledDot<float>> reversed({}, {1, 1, 1, 1, 3, 7, 4, 4}, key_range<float>(6, 2));
  CHECK(message_of([&] {
          reversed.forward();
        }).find("key_range is [6, 2), its end must not lie before its beginning") !=
        std::string::npos);
  OpCall<ScaledDot<float>> call({}, {1, 1, 1, 1, 3, 7, 4, 4}, key_range<float>(3, 8));
  CHECK(message_of([&] { call.forward(); }).find("key_range is [3, 8), it must lie in [0, 7]") !=
        std::string::npos);
}

TEST_CASE("What out holds where a part saw no key does not reach the whole", "[engine]") {
  Partial<float> a(Shape{1, 1, 2, 1}), b(a.shape);
  a.out = {std::numeric_limits<float>::quiet_NaN(), 2.0F};
  a.lse[1] = b.lse[0] = b.lse[1] = 0.0F;
  b.out = {3.0F, 4.0F};
  CHECK(merge(a, b).out == std::vector<float>{3.0F, 3.0F});
  CHECK(merge(b, a).out == std::vector<float>{3.0F, 3.0F});
}

TEST_CASE("A part that is NaN makes the whole NaN, in its row alone", "[engine]") {
  Partial<float> a(Shape{1, 1, 2, 1}), b(a.shape);
  a.lse = {std::numeric_limits<float>::quiet_NaN(), 1.0F};
  a.out = {a.lse[0], 2.0F};
  b.lse = {0.0F, 1.0F};
  b.out = {1.0F, 4.0F};
  for (const Partial<float>& whole : {merge(a, b), merge(b, a)}) {
    CHECK(std::isnan(whole.out[0]));
    CHECK(std::isnan(whole.lse[0]));
    CHECK(whole.out[1] == Approx(3.0F));
  }
}

TEST_CASE("Few queries over many keys are computed in parts, by as many threads as there are",
          "[engine]") {
  const Index len = 3 * kPartKeys + 100;
  const auto check = [&](auto op, const Geometry& g, const Mask<float>& mask) {
    using Op = decltype(op);
    const Explanation plan = explain(op, g, mask);
    CHECK(plan.units >= 3);
    OpCall<Op> call(op, g, mask);
    call.lse.assign(std::size_t(g.query_rows()), 0);
    call.options.threads = 1;
    call.forward();
    const std::vector<float> out = call.out, lse = call.lse, state = call.saved.state;
    for (const int threads : {2, 3, 7}) {
      call.options.threads = threads;
      call.forward();
      CHECK(call.out == out);
      CHECK(call.lse == lse);
      CHECK(call.saved.state == state);
    }
    // Compares with the reference, which reads one key after the other.
    const auto twin = reference::forward(cast_op<double>(op), problem_of<double>(call));
    for (std::size_t n = 0; n < out.size(); ++n)
      CHECK(std::abs(double(out[n]) - twin.out[n]) < 1e-5);
    for (std::size_t n = 0; n < lse.size(); ++n)
      if (double(lse[n]) != twin.lse[0][n]) CHECK(std::abs(double(lse[n]) - twin.lse[0][n]) < 1e-5);
  };
  check(ScaledDot<float>{}, {1, 1, 1, 1, 1, len, 8, 8}, {});
  check(ScaledDot<float>{}, {1, 4, 4, 1, 1, len, 8, 8}, {});  // heads that are folded
  check(ScaledDot<float>{}, {2, 2, 2, 2, 3, len, 8, 8}, causal<float>(Align::bottom_right, -5000));
  check(ScaledDot<float>{}, {1, 1, 1, 1, 2, len, 8, 8}, key_lengths<float>({kPartKeys / 2}));
  check(Dar<float>{}, {1, 2, 2, 1, 5, len, 8, 8}, window<float>(4500, 0, Align::bottom_right));
}

TEST_CASE("Rows of parts have no key, a NaN or an infinity where the whole has", "[engine]") {
  const Geometry g{1, 1, 1, 1, 2, 2 * kPartKeys, 4, 4};
  OpCall<ScaledDot<float>> call({}, g);
  REQUIRE(explain(call.op, g).units == 2);
  SECTION("a NaN in the second part") {
    call.key[std::size_t(g.len_kv - 1) * 4] = std::numeric_limits<float>::quiet_NaN();
    call.forward();
    for (const float x : call.out) CHECK(std::isnan(x));
  }
  SECTION("no key at all") {
    call.mask = key_lengths<float>({0});
    call.forward();
    for (const float x : call.out) CHECK(x == 0);
    CHECK(call.saved.lse[0] == -std::numeric_limits<float>::infinity());
  }
  SECTION("huge scores in one part, small ones in the other") {
    for (std::size_t n = 0; n < 8; ++n) call.query[n] = 1e18F;
    for (std::size_t n = 0; n < 4; ++n) call.key[n] = 1e18F;
    call.forward();
    for (std::size_t n = 0; n < 8; ++n) CHECK(call.out[n] == call.value[n % 4]);
  }
  SECTION("gradients of a forward pass in parts") {
    call.forward();
    call.backward();
    OpCall<ScaledDot<double>> exact({}, g);
    exact.query.assign(call.query.begin(), call.query.end());
    exact.key.assign(call.key.begin(), call.key.end());
    exact.value.assign(call.value.begin(), call.value.end());
    exact.grad_out.assign(call.grad_out.begin(), call.grad_out.end());
    exact.forward();
    exact.backward();
    for (std::size_t n = 0; n < call.grad_query.size(); ++n)
      CHECK(double(call.grad_query[n]) == Approx(exact.grad_query[n]).margin(1e-5));
  }
}

TEST_CASE("A cache of pages is read in parts, too", "[engine]") {
  const Geometry g{1, 2, 2, 1, 1, 2 * kPartKeys + 64, 8, 8};
  OpCall<Dar<float>> call({}, g);
  call.forward();
  KvCache<float> cache(1, 1, 8, 8);
  cache.append(call.inputs().key, call.inputs().value);
  std::vector<float> out(call.out.size());
  forward(call.op, cache.inputs(call.inputs().query), {}, {out.data(), g.out_shape()});
  CHECK(distance(out, call.out) < 1e-6);
}
