// SPDX-License-Identifier: Apache-2.0
// Hessian-vector products: against central differences of backward, and by the symmetry of the Hessian.

#include "bell_numbers.hpp"
#include "hessian_products.hpp"
#include "message_of.hpp"

#include <heed/ops/dar.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/features.hpp>
#include <heed/plug/own_score.hpp>

#include <limits>

using namespace heed;
using namespace heed_test;

namespace {

// A bell of the distance, a power and a maximum, and a table of distances, which multiplies.
template <class T>
struct Bell : BellNumbers<T> {
  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S bell = math::exp(S(-p[0] * squared_distance(pair)));
    const S high = math::maximum(pair.logit, S(S(-0.5) * pair.logit));
    return bell * (S(1) + pair.position) + math::tanh(pair.position) + S(0.2) * high * high +
           math::log1p(S(math::absolute(pair.dot) + S(1))) * math::sigmoid(pair.logit);
  }
};

}  // namespace

TEST_CASE("Hessian-vector products of plain attention are those of central differences", "[hvp]") {
  check_masks(ScaledDot<double>{});
}

TEST_CASE("Hessian-vector products of adaptive resonance are those of central differences",
          "[hvp]") {
  Dar<double> op;
  op.score.strength = {0.3, 0.1, -0.4, 0.7};
  op.score.sharpness = 3.0;
  check_masks(op);
  for (const int iterations : {2, 4}) {
    op.score.iterations = iterations;
    check_differences(OpCall(op, kHessianSizes, causal<double>()));
  }
  op.score.converged = true;
  op.score.adaptive = true;
  check_differences(OpCall(op, kHessianSizes, causal<double>()));
}

TEST_CASE("Hessian-vector products of an own score are those of central differences", "[hvp]") {
  check_masks(OwnAttention<Bell, double>{});
}

TEST_CASE("Hessian-vector products have the same bits for any number of threads", "[hvp]") {
  OpCall<Dar<double>> call({}, {2, 4, 4, 2, 37, 61, 6, 5}, causal<double>(Align::bottom_right),
                           {.threads = 1, .key_tile = 8});
  check_threads(call);
}

TEST_CASE("Hessian-vector products of long rows of float are symmetric", "[hvp]") {
  const Geometry g{1, 2, 2, 1, 70, 300, 16, 8};
  check_symmetry(OpCall<ScaledDot<float>>({}, g, causal<float>(Align::bottom_right)), 1e-5);
  check_symmetry(OpCall<Dar<float>>({}, g), 1e-5);
  check_symmetry(OpCall<ScaledDot<float>>({}, {1, 4, 4, 2, 1, 90, 16, 8}), 1e-5);
}

TEST_CASE("What a mask hides leaves no trace in Hessian-vector products", "[hvp]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Geometry g{1, 2, 2, 1, 9, 40, 6, 5};
  // Hides keys among the visible ones, and behind them.
  bool seen[40];
  for (Index j = 0; j < 40; ++j) seen[j] = j != 4 && j != 17 && j < 31;
  const Mask<double> mask = boolean<double>(TensorView<const bool>(seen, {1, 1, 1, 40}));
  const auto look = [&]<class Op>(const Op& op) {
    OpCall<Op> call(op, g, mask);
    Direction<Op> direction(call, 7);
    const auto clean = run_hvp(call, direction);
    for (Index j = 0; j < 40; ++j)
      for (Index c = 0; c < 6 && !seen[j]; ++c) {
        call.key[std::size_t(j * 6 + c)] = direction.key[std::size_t(j * 6 + c)] = nan;
        if (c < 5)
          call.value[std::size_t(j * 5 + c)] = direction.value[std::size_t(j * 5 + c)] = nan;
      }
    CHECK(run_hvp(call, direction) == clean);
  };
  look(ScaledDot<double>{});
  look(Dar<double>{});
}

TEST_CASE("A query of NaN spoils what it sees alone", "[hvp]") {
  const Geometry g{1, 1, 1, 1, 12, 12, 4, 4};
  OpCall<Dar<double>> call({}, g, causal<double>(Align::top_left, 0));
  Direction<Dar<double>> direction(call, 7);
  const auto clean = run_hvp(call, direction);
  direction.query[0] = std::numeric_limits<double>::quiet_NaN();  // query 0 sees key 0
  const auto touched = run_hvp(call, direction);
  for (std::size_t n = 0; n < clean.key.size(); ++n) {
    INFO(n);
    CHECK((n < 4 ? std::isnan(touched.key[n]) : touched.key[n] == clean.key[n]));
    CHECK((n < 4 ? std::isnan(touched.query[n]) : touched.query[n] == clean.query[n]));
  }
}

TEST_CASE("hvp() refuses what does not fit", "[hvp]") {
  const Geometry g{1, 2, 2, 1, 5, 7, 4, 4};
  OpCall<Dar<double>> call({}, g);
  Direction<Dar<double>> direction(call, 7);
  call.forward();
  std::vector<double> to(call.query.size());
  const auto run = [&](const Tangents<double>& d, const StoredView<const double>& dout,
                       const Gradients<double>& views) {
    return message_of([&] {
      hvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), call.grad_out_view(), d,
          dout, views);
    });
  };
  const Gradients<double> views{{to.data(), g.query_shape()}};
  const double* numbers = direction.query.data();
  CHECK(run({StoredView<const double>(numbers, {1, 2, 4, 4})}, {}, views) ==
        "heed::hvp: the tangent of query has shape (1,2,4,4), it must be (1,2,5,4)");
  CHECK(run({}, StoredView<const double>(numbers, {1, 2, 4, 4}), views) ==
        "heed::hvp: the tangent of grad_out has shape (1,2,4,4), it must be (1,2,5,4)");
  CHECK(run({StoredView<const double>(to.data(), g.query_shape())}, {}, views) ==
        "heed::hvp: grad_query overlaps the tangent of query");
  CHECK(run({}, StoredView<const double>(to.data(), g.out_shape()), views) ==
        "heed::hvp: grad_query overlaps the tangent of grad_out");
  Tangents<double> biased;
  biased.bias = {numbers, {1, 1, 5, 7}};
  CHECK(run(biased, {}, views) == "heed::hvp: the tangent of bias was given, the call has no bias");
  OpCall<ScaledDot<float>> mixed({}, g, {}, {.precision = Precision::mixed});
  const Direction<ScaledDot<float>> mixed_direction(mixed, 7);
  CHECK(message_of([&] { (void)run_hvp(mixed, mixed_direction); }) ==
        "heed::hvp: precision is mixed, it must be storage; second derivatives are computed as "
        "they are stored");
  // Inputs that are a part of a call, or several calls.
  Inputs<double> in = call.inputs();
  const auto run_inputs = [&](const Inputs<double>& of) {
    return message_of([&] {
      hvp(call.op, of, call.mask, call.saved, call.out_view(), call.grad_out_view(), {}, {}, views);
    });
  };
  in.share = {0, 2, 0, 0};
  CHECK(run_inputs(in) ==
        "heed::hvp: a share of a call was given (Inputs::share); forward() and backward() alone "
        "take one");
  Packed<double> packed;
  packed.queries = {0, 2, 5};
  packed.keys = {0, 3, 7};
  CHECK(run_inputs(PackedInputs<double>(call.inputs(), &packed)) ==
        "heed::hvp: packed sequences were given, this takes one of them at a time; forward() and "
        "backward() take them as PackedInputs");
  call.op.score.basis = Param<double>({4, 1}, {1, 0, 0, 0});
  CHECK(run({}, {}, views) ==
        "heed::hvp: the score has a projection, second derivatives are for scores at full width");
}
