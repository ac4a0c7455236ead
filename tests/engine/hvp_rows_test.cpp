// SPDX-License-Identifier: Apache-2.0
// Hessian-vector products of own scores that read relative rows, transformed rows and features with parameters: against central
// differences of backward, and by the symmetry of the Hessian.

#include "hessian_products.hpp"
#include "learnt_features.hpp"
#include "turned_scores.hpp"

#include <heed/plug/features.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

using namespace heed;
using namespace heed_test;

namespace {

// Cosines of turned rows, whose products the engine may scale as it likes.
template <class T>
struct TurnedCosine {
  using Transform = Rotation<T>;
  using Features = InverseNorms;
  using NormedDots = TurnedCosine;
  Param<T> heat = T(2.5);
  static constexpr auto parameters = std::tuple{named("heat", &TurnedCosine::heat)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * cosine(pair);
  }
};

template <class Op>
void check_transform() {
  check_masks(filled<Op>(kHessianSizes, true));
  check_differences(OpCall<Op>(filled<Op>(kHessianSizes, false), kHessianSizes));
}

}  // namespace

TEST_CASE("Hessian-vector products of relative rows and learnt features are those of differences",
          "[hvp]") {
  using Op = OwnAttention<Shaw, double>;
  Op op = filled<Op>(kHessianSizes, true);
  op.score.weight = {0.3, 0.4, 0.5, 0.6};
  check_masks(op);
  op = filled<Op>(kHessianSizes, false);
  check_differences(OpCall<Op>(op, kHessianSizes));
  check_differences(OpCall<Op>(op, {2, 4, 4, 2, 1, 14, 5, 3, 13}));
}

TEST_CASE("Hessian-vector products of rows that are normed and turned are those of differences",
          "[hvp]") {
  check_transform<OwnAttention<NormedTurned, double>>();
}

TEST_CASE("Hessian-vector products through a transform of one's own are those of differences",
          "[hvp]") {
  check_transform<OwnAttention<Bent, double>>();
}

TEST_CASE("Hessian-vector products of cosines of turned rows are those of differences", "[hvp]") {
  check_transform<OwnAttention<TurnedCosine, double>>();
}

TEST_CASE("Hessian-vector products under a learnt metric are those of differences", "[hvp]") {
  using Op = OwnAttention<Metric, double>;
  check_differences(OpCall<Op>(filled<Op>(kHessianSizes, true), kHessianSizes, causal<double>()));
}

TEST_CASE("Hessian-vector products of relative rows of turned queries are those of differences",
          "[hvp]") {
  using Op = OwnAttention<TurnedShaw, double>;
  check_transform<Op>();
  const Geometry one{2, 4, 4, 2, 1, 14, 5, 3, 13};
  check_differences(OpCall<Op>(filled<Op>(one, true), one));
  check_symmetry(OpCall<Op>(filled<Op>(one, true), one), 1e-12);
}

TEST_CASE("Of transformed rows one input may move alone", "[hvp]") {
  using Op = OwnAttention<TurnedShaw, double>;
  OpCall<Op> call(filled<Op>(kHessianSizes, false), kHessianSizes, causal<double>());
  const Geometry& g = call.geometry();
  const Direction<Op> all(call, 7);
  Direction<Op> none = all;
  for (auto* numbers : {&none.query, &none.key, &none.value, &none.grad_out})
    std::fill(numbers->begin(), numbers->end(), 0.0);
  none.op = zeros_like(none.op);
  const auto compare = [&](const Tangents<double>& along, const Op* op, auto Direction<Op>::*part) {
    Direction<Op> alone = none;
    alone.*part = all.*part;
    const auto wanted = run_hvp(call, alone);
    std::vector<double> query(call.query.size()), key(call.key.size());
    Op to_op = call.op;
    hvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), call.grad_out_view(), along,
        {}, {{query.data(), g.query_shape()}, {key.data(), g.key_shape()}}, &to_op, op);
    CHECK(distance(query, wanted.query) < 1e-13);
    CHECK(distance(key, wanted.key) < 1e-13);
    CHECK(distance(parameters_of(to_op), wanted.parameters) < 1e-13);
    hvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), call.grad_out_view(), along,
        {}, {{}, {key.data(), g.key_shape()}}, nullptr, op);
    CHECK(distance(key, wanted.key) < 1e-13);
  };
  const Tangents<double> d = all.tangents(call);
  compare({d.query}, nullptr, &Direction<Op>::query);
  compare({{}, d.key}, nullptr, &Direction<Op>::key);
  compare({}, &all.op, &Direction<Op>::op);
}

TEST_CASE(
    "Hessian-vector products of transformed rows have the same bits for any number of threads",
    "[hvp]") {
  using Op = OwnAttention<TurnedShaw, double>;
  const Geometry g{2, 4, 4, 2, 37, 61, 6, 5};
  check_threads(
      OpCall<Op>(filled<Op>(g, false), g, causal<double>(Align::bottom_right), {.key_tile = 8}));
}

TEST_CASE("What is hidden leaves no trace in Hessian-vector products of transformed rows",
          "[hvp]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Geometry g{1, 2, 2, 1, 9, 40, 6, 5};
  // Hides keys among the visible ones and behind them, and all keys of one query.
  bool seen[9 * 40];
  for (Index i = 0; i < 9; ++i)
    for (Index j = 0; j < 40; ++j) seen[i * 40 + j] = i != 3 && j != 4 && j != 17 && j < 31;
  const Mask<double> mask = boolean<double>(TensorView<const bool>(seen, {1, 1, 9, 40}));
  const auto look = [&]<class Op>(const Op& op) {
    OpCall<Op> call(op, g, mask);
    Direction<Op> direction(call, 7);
    const auto clean = run_hvp(call, direction);
    const auto spoil = [&](std::vector<double>& numbers, std::vector<double>& tangents, Index row) {
      for (Index c = 0; c < 6; ++c)
        numbers[std::size_t(row * 6 + c)] = tangents[std::size_t(row * 6 + c)] = nan;
    };
    for (Index j = 0; j < 40; ++j)
      if (!seen[j]) spoil(call.key, direction.key, j);
    for (Index h = 0; h < 2; ++h) spoil(call.query, direction.query, h * 9 + 3);
    CHECK(run_hvp(call, direction) == clean);
  };
  look(filled<OwnAttention<TurnedShaw, double>>(g, true));
  look(filled<OwnAttention<NormedTurned, double>>(g, true));
}
