// SPDX-License-Identifier: Apache-2.0
// Forward mode of softmax ops: against backward by the transpose identity, and against central differences.

#include "bell_numbers.hpp"
#include "direction.hpp"
#include "message_of.hpp"

#include <heed/ops/dar.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/features.hpp>
#include <heed/plug/own_score.hpp>

#include <limits>

using namespace heed;
using namespace heed_test;

namespace {

// exp(-width |q - k|^2), with a table of distances.
template <class T>
struct Bell : BellNumbers<T> {
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return math::exp(S(-p[0] * squared_distance(pair))) + S(0.3) * pair.logit + pair.position;
  }
};
template <class T>
using BellAttention = OwnAttention<Bell, T>;

const Geometry kGeometry{2, 4, 4, 2, 19, 23, 6, 5};

[[nodiscard]] std::vector<double> some_bias(Index count) {
  std::vector<double> bias(std::size_t(count), 0);
  for (std::size_t n = 0; n < bias.size(); ++n)
    bias[n] = n % 7 == 3 ? -kInfinity<double> : std::sin(double(n));
  return bias;
}

template <class Op>
void check_masks(const Op& op) {
  const std::vector<double> bias = some_bias(4 * 19 * 23), shared = some_bias(23);
  const Mask<double> masks[] = {
      {},
      causal<double>(Align::bottom_right),
      window<double>(3, 1) & soft_cap<double>(2.0),
      key_lengths<double>({20, 0}),
      heed::bias<double>(TensorView<const double>(bias.data(), {1, 4, 19, 23})) & causal<double>(),
      heed::bias<double>(TensorView<const double>(shared.data(), {1, 1, 1, 23})),
      alibi<double>({0.5, 0.25, 0.125, 0.1})};
  for (const Mask<double>& mask : masks)
    for (const Options& options :
         {Options{}, Options{.threads = 3, .key_tile = 1, .panel_vectors = 1}}) {
      INFO("mask " << &mask - masks << ", key_tile " << options.key_tile);
      check_forward_mode(OpCall<Op>(op, kGeometry, mask, options), 1e-12, 1e-7);
    }
}

}  // namespace

TEST_CASE("Forward mode of plain attention is the transpose of backward", "[jvp]") {
  check_masks(ScaledDot<double>{});
}

TEST_CASE("Forward mode of adaptive resonance is the transpose of backward", "[jvp]") {
  Dar<double> op;
  op.score.strength = {0.3, 0.1, -0.4, 0.7};
  op.score.sharpness = 3.0;
  check_masks(op);
  const Mask<double> mask = causal<double>();
  op.score.iterations = 2;
  check_forward_mode(OpCall(op, kGeometry, mask), 1e-12, 1e-7);
  op.score.iterations = 5;
  check_forward_mode(OpCall(op, kGeometry, mask), 1e-12, 1e-7);
  op.score.converged = true;
  check_forward_mode(OpCall(op, kGeometry, mask), 1e-12, 1e-7);
  op.score.adaptive = true;
  op.score.gate = GateKind::tanh;
  check_forward_mode(OpCall(op, kGeometry, mask), 1e-12, 1e-7);
  op.score.basis = Param<double>({6, 2}, {1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0});
  check_forward_mode(OpCall(op, kGeometry, mask), 1e-12, 1e-7);
}

TEST_CASE("Forward mode of an own score is the transpose of backward", "[jvp]") {
  check_masks(BellAttention<double>{});
}

TEST_CASE("Forward mode in float is the transpose of backward", "[jvp]") {
  const Geometry g{1, 2, 2, 1, 70, 300, 16, 8};
  check_forward_mode(OpCall<ScaledDot<float>>({}, g, causal<float>(Align::bottom_right)), 2e-5);
  check_forward_mode(OpCall<Dar<float>>({}, g, {}), 2e-5);
  check_forward_mode(OpCall<BellAttention<float>>({}, g, window<float>(40, 0, Align::bottom_right)),
                     2e-5);
}

TEST_CASE("Tangents have the same bits for any number of threads", "[jvp]") {
  const Geometry g{2, 4, 4, 2, 37, 61, 6, 5};
  OpCall<Dar<double>> call({}, g, causal<double>(Align::bottom_right),
                           {.threads = 1, .key_tile = 8});
  const Direction<Dar<double>> direction(call, 7);
  for (const bool saved : {true, false}) {
    call.options.threads = 1;
    const auto alone = run_jvp(call, direction, saved);
    for (const int threads : {2, 3, 8}) {
      call.options.threads = threads;
      CHECK(run_jvp(call, direction, saved) == alone);
    }
  }
}

TEST_CASE("Forward mode takes few queries, and dropped weights", "[jvp]") {
  for (const Index len_q : {1, 2, 3}) {
    const Geometry g{1, 4, 4, 2, len_q, 150, 6, 5};
    check_forward_mode(OpCall<ScaledDot<double>>({}, g, causal<double>(Align::bottom_right)), 1e-12,
                       1e-7);
    check_forward_mode(OpCall<BellAttention<double>>({}, g), 1e-12, 1e-7);
  }
  const Options dropping{.dropout = {.rate = 0.3, .seed = 5}};
  check_forward_mode(OpCall<Dar<double>>({}, kGeometry, causal<double>(), dropping), 1e-12, 1e-7);
}

TEST_CASE("A tangent that is not given does not move", "[jvp]") {
  OpCall<Dar<double>> call({}, kGeometry);
  const Direction<Dar<double>> all(call, 7);
  Direction<Dar<double>> none = all;
  for (auto* numbers : {&none.query, &none.key, &none.value})
    std::fill(numbers->begin(), numbers->end(), 0.0);
  none.op = zeros_like(none.op);
  const Tangents<double> d = all.tangents(call);
  std::vector<double> tangent(call.out.size());
  const auto run = [&](const Tangents<double>& along, const Dar<double>* op) {
    jvp(call.op, call.inputs(), call.mask, along, {call.out.data(), call.geometry().out_shape()},
        {tangent.data(), call.geometry().out_shape()}, op);
    return tangent;
  };
  const auto compare = [&](const Tangents<double>& along, const Dar<double>* op,
                           auto Direction<Dar<double>>::*part) {
    Direction<Dar<double>> alone = none;
    alone.*part = all.*part;
    CHECK(distance(run(along, op), run_jvp(call, alone, true).out_tangent) < 1e-13);
  };
  compare({d.query}, nullptr, &Direction<Dar<double>>::query);
  compare({{}, d.key}, nullptr, &Direction<Dar<double>>::key);
  compare({{}, {}, d.value}, nullptr, &Direction<Dar<double>>::value);
  compare({}, &all.op, &Direction<Dar<double>>::op);
}

TEST_CASE("What a mask hides leaves no trace in tangents", "[jvp]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Geometry g{1, 2, 2, 1, 9, 40, 6, 5};
  // Hides keys among the visible ones, and behind them.
  bool seen[40];
  for (Index j = 0; j < 40; ++j) seen[j] = j != 4 && j != 17 && j < 31;
  const Mask<double> mask = boolean<double>(TensorView<const bool>(seen, {1, 1, 1, 40}));
  const auto look = [&]<class Op>(const Op& op) {
    OpCall<Op> call(op, g, mask);
    Direction<Op> direction(call, 7);
    for (const bool saved : {true, false}) {
      const auto clean = run_jvp(call, direction, saved);
      OpCall<Op> spoilt_call = call;
      Direction<Op> spoilt = direction;
      for (Index j = 0; j < 40; ++j)
        for (Index c = 0; c < 6 && !seen[j]; ++c) {
          spoilt_call.key[std::size_t(j * 6 + c)] = nan;
          spoilt.key[std::size_t(j * 6 + c)] = nan;
          if (c < 5) spoilt_call.value[std::size_t(j * 5 + c)] = nan;
          if (c < 5) spoilt.value[std::size_t(j * 5 + c)] = nan;
        }
      CHECK(run_jvp(spoilt_call, spoilt, saved) == clean);
    }
    // One query of NaN makes its own row NaN, and no other.
    Direction<Op> one = direction;
    one.query[0] = nan;
    const auto clean = run_jvp(call, direction, true), touched = run_jvp(call, one, true);
    for (std::size_t n = 0; n < clean.out_tangent.size(); ++n)
      CHECK((n < 5 ? std::isnan(touched.out_tangent[n])
                   : touched.out_tangent[n] == clean.out_tangent[n]));
  };
  look(ScaledDot<double>{});
  look(Dar<double>{});
  look(BellAttention<double>{});
}

TEST_CASE("Rows that are NaN have NaN tangents, rows that see nothing none", "[jvp]") {
  const Geometry g{1, 1, 1, 1, 3, 20, 4, 4};
  OpCall<ScaledDot<double>> call({}, g, causal<double>(Align::top_left, -1));
  Direction<ScaledDot<double>> direction(call, 7);
  call.query[8] = std::numeric_limits<double>::quiet_NaN();
  for (const bool saved : {true, false}) {
    const auto moved = run_jvp(call, direction, saved);
    for (std::size_t n = 0; n < 4; ++n) {
      CHECK(moved.out_tangent[n] == 0.0);
      CHECK(std::isfinite(moved.out_tangent[4 + n]));
      CHECK(std::isnan(moved.out_tangent[8 + n]));
    }
    CHECK(moved.lse_tangent[0] == 0.0);
    CHECK(std::isnan(moved.lse_tangent[2]));
  }
}

TEST_CASE("jvp() refuses what does not fit", "[jvp]") {
  const Geometry g{1, 2, 2, 1, 5, 7, 6, 4};
  OpCall<Dar<double>> call({}, g);
  const Direction<Dar<double>> direction(call, 7);
  call.forward();
  std::vector<double> tangent(call.out.size());
  const Outputs<double> to(tangent.data(), g.out_shape());
  const StoredView<const double> out(call.out.data(), g.out_shape());
  const auto run = [&](const Tangents<double>& d, const Outputs<double>& to_view,
                       const Dar<double>* op = nullptr, const Options& options = {}) {
    return message_of(
        [&] { jvp(call.op, call.inputs(), call.mask, call.saved, out, d, to_view, op, options); });
  };
  CHECK(run({StoredView<const double>(direction.query.data(), {1, 2, 5, 4})}, to) ==
        "heed::jvp: the tangent of query has shape (1,2,5,4), it must be (1,2,5,6)");
  Tangents<double> biased;
  biased.bias = {direction.query.data(), {1, 1, 5, 7}};
  CHECK(run(biased, to) == "heed::jvp: the tangent of bias was given, the call has no bias");
  Dar<double> other;
  other.score.strength = {1, 2};
  CHECK(run({}, to, &other) ==
        "heed::jvp: strength of the op's tangent has shape (2), that of the op has (1)");
  CHECK(run({}, {call.out.data(), g.out_shape()}) == "heed::jvp: the tangent of out overlaps out");
  CHECK(run({}, to, nullptr, {.scale = 3.0}) ==
        "heed::jvp: saved is of a call with scale 0.4082482904638631, this one has 3");
  std::vector<double> both(tangent.size());
  const Tangents<double> same{{}, {}, {}};
  CHECK(message_of([&] {
          jvp(call.op, call.inputs(), call.mask, same, {both.data(), g.out_shape()},
              {both.data(), g.out_shape()});
        }) == "heed::jvp: out overlaps the tangent of out");
  OpCall<ScaledDot<float>> mixed({}, g, {}, {.precision = Precision::mixed});
  const Direction<ScaledDot<float>> mixed_direction(mixed, 7);
  CHECK(message_of([&] { (void)run_jvp(mixed, mixed_direction, false); }) ==
        "heed::jvp: precision is mixed, it must be storage; tangents are computed as they are "
        "stored");
}

TEST_CASE("Tangents may be stored in 16 bits", "[jvp]") {
  OpCall<ScaledDot<float>> call({}, kGeometry);
  Direction<ScaledDot<float>> direction(call, 7);
  std::vector<bfloat16> narrow;
  for (float& x : direction.query) {
    narrow.push_back(bfloat16(x));
    x = float(narrow.back());
  }
  const auto wide = run_jvp(call, direction, false);
  Tangents<float> d = direction.tangents(call);
  d.query =
      StoredView<const float>(TensorView<const bfloat16>(narrow.data(), kGeometry.query_shape()));
  std::vector<float> tangent(call.out.size());
  jvp(call.op, call.inputs(), call.mask, d, {call.out.data(), kGeometry.out_shape()},
      {tangent.data(), kGeometry.out_shape()}, &direction.op);
  CHECK(tangent == wide.out_tangent);
}
