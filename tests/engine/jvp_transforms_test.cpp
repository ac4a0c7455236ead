// SPDX-License-Identifier: Apache-2.0
// Forward mode through row transforms, with tangents of rows, of learnt parameters or of both:
// against backward by the transpose identity, and against central differences.

#include "direction.hpp"
#include "turned_scores.hpp"

#include <heed/ops/differential.hpp>
#include <heed/plug/own_score.hpp>

#include <cmath>
#include <limits>

using namespace heed;
using namespace heed_test;

namespace {

template <class T>
using TwoMaps = Attention<T, OwnScore<Turned, T>, Difference<T, GivenLambda<T>>, Identity<T>>;

template <class Op>
void check_op_everywhere() {
  for (const bool per_head : {false, true})
    for (const Index len_q : {19, 3, 1}) {  // two and one of them are read as in decoding
      const Geometry g{2, 4, 4, 2, len_q, 23, 6, 6};
      INFO("per head " << per_head << ", len_q " << len_q);
      const Op op = filled<Op>(g, per_head);
      check_forward_mode(OpCall<Op>(op, g, causal<double>(Align::bottom_right)), 1e-12, 1e-7);
      check_forward_mode(OpCall<Op>(op, g, soft_cap<double>(2.0) & key_lengths<double>({20, 0}),
                                    {.threads = 3,
                                     .key_tile = 1,
                                     .panel_vectors = 1,
                                     .dropout = {.rate = 0.2, .seed = 3}}),
                         1e-12, 1e-7);
    }
}

}  // namespace

TEST_CASE("Forward mode through row transforms is the transpose of backward", "[jvp]") {
  SECTION("a rotation of learnt base") { check_op_everywhere<OwnAttention<Turned, double>>(); }
  SECTION("a norm, then a rotation") { check_op_everywhere<OwnAttention<NormedTurned, double>>(); }
  SECTION("a learnt metric") { check_op_everywhere<OwnAttention<Metric, double>>(); }
  SECTION("one's own, with features") { check_op_everywhere<OwnAttention<Bent, double>>(); }
  SECTION("relative rows of turned queries") {
    check_op_everywhere<OwnAttention<TurnedShaw, double>>();
  }
  SECTION("two maps") { check_op_everywhere<TwoMaps<double>>(); }
}

TEST_CASE("Forward mode through row transforms in float is the transpose of backward", "[jvp]") {
  const Geometry g{1, 4, 4, 2, 70, 150, 16, 8};
  using Op = OwnAttention<NormedTurned, float>;
  check_forward_mode(OpCall<Op>(filled<Op>(g, true), g, causal<float>(Align::bottom_right)), 3e-5);
}

TEST_CASE("Of a transform rows may move alone, and so may its parameters", "[jvp]") {
  using Op = OwnAttention<Bent, double>;
  const Geometry g{1, 4, 4, 2, 9, 12, 6, 5};
  OpCall<Op> call(filled<Op>(g, false), g);
  const Direction<Op> all(call, 7);
  Direction<Op> none = all;
  for (auto* numbers : {&none.query, &none.key, &none.value})
    std::fill(numbers->begin(), numbers->end(), 0.0);
  none.op = zeros_like(none.op);
  const Tangents<double> d = all.tangents(call);
  std::vector<double> tangent(call.out.size());
  const auto compare = [&](const Tangents<double>& along, const Op* op, auto Direction<Op>::*part) {
    Direction<Op> alone = none;
    alone.*part = all.*part;
    jvp(call.op, call.inputs(), call.mask, along, {call.out.data(), g.out_shape()},
        {tangent.data(), g.out_shape()}, op);
    CHECK(distance(tangent, run_jvp(call, alone, true).out_tangent) < 1e-13);
    CHECK(distance(tangent, difference_quotient(call, alone, 1e-5)) < 1e-7);
  };
  compare({d.query}, nullptr, &Direction<Op>::query);
  compare({{}, d.key}, nullptr, &Direction<Op>::key);
  compare({}, &all.op, &Direction<Op>::op);
}

TEST_CASE("What a hidden key holds does not get through a transform into tangents", "[jvp]") {
  using Op = OwnAttention<NormedTurned, double>;
  const Geometry g{1, 2, 2, 1, 9, 40, 6, 5};
  bool seen[40];
  for (Index j = 0; j < 40; ++j) seen[j] = j != 4 && j != 17 && j < 31;
  OpCall<Op> call(filled<Op>(g, true), g,
                  boolean<double>(TensorView<const bool>(seen, {1, 1, 1, 40})));
  Direction<Op> direction(call, 7);
  const auto clean = run_jvp(call, direction, true), found = run_jvp(call, direction, false);
  for (Index j = 0; j < 40; ++j)
    for (Index c = 0; c < 6 && !seen[j]; ++c)
      call.key[std::size_t(j * 6 + c)] = direction.key[std::size_t(j * 6 + c)] =
          std::numeric_limits<double>::quiet_NaN();
  CHECK(run_jvp(call, direction, true) == clean);
  CHECK(run_jvp(call, direction, false) == found);
}

TEST_CASE("Tangents through transforms have the same bits for any number of threads", "[jvp]") {
  using Op = OwnAttention<NormedTurned, float>;
  const Geometry g{2, 4, 4, 2, 37, 61, 8, 5};
  OpCall<Op> call(filled<Op>(g, true), g, causal<float>(Align::bottom_right), {.threads = 1});
  const Direction<Op> direction(call, 7);
  const auto alone = run_jvp(call, direction, true);
  for (const int threads : {2, 3, 8}) {
    call.options.threads = threads;
    CHECK(run_jvp(call, direction, true) == alone);
  }
}
