// SPDX-License-Identifier: Apache-2.0
// Hessian-vector products of own scores that read numbers of tokens: against central differences of backward, and by the
// symmetry of the Hessian.

#include "hessian_products.hpp"
#include "message_of.hpp"

#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

using namespace heed;
using namespace heed_test;

namespace {

// Scores with plain numbers of tokens, which multiply.
template <class T>
struct Heated {
  using Features = TokenInputs<2, 1>;
  Param<T> strength = T(0.6);
  static constexpr auto parameters = std::tuple{named("strength", &Heated::strength)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * math::sigmoid(pair.query[0]) +
           p[0] * math::tanh(S(pair.query[1] * pair.key[0]));
  }
};

// Scores with two sums over tokens, none of which cancels in a softmax.
template <class T>
struct Damped {
  using Features = CumulativeInputs<2, LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * math::exp(S(S(0.1) * pair.query[0])) +
           math::tanh(S(S(0.2) * (pair.query[1] - pair.key[1]))) -
           S(0.02) * pair.key[0] * pair.key[0];
  }
};

// Features of a number of the token u, the row x and p:  p0 u x_0 + u^2 x_1 of queries,  p1 u |x|^2 of keys.
struct Mixture : NothingDerived {
  static constexpr int query_features = 1, key_features = 1, query_inputs = 1, key_inputs = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    const S u = row.input(0);
    f[0] = p[0] * u * row.x(0) + u * u * row.x(1);
  }
  template <class Row, class P, class S, class Add>
  void query_features_vjp(const Row& row, const P& p, const S*, const S* df, const Add& add,
                          P& dp) const {
    const S u = row.input(0);
    dp[0] += df[0] * u * row.x(0);
    add.add_x(0, df[0] * p[0] * u);
    add.add_x(1, df[0] * u * u);
    add.add_input(0, df[0] * (p[0] * row.x(0) + S(2) * u * row.x(1)));
  }
  template <class Row, class S>
  void key_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[1] * row.input(0) * SquaredNorm::of<S>(row);
  }
  template <class Row, class P, class S, class Add>
  void key_features_vjp(const Row& row, const P& p, const S* f, const S* df, const Add& add,
                        P& dp) const {
    const S square = SquaredNorm::of<S>(row);
    dp[1] += df[0] * row.input(0) * square;
    add.add_input(0, df[0] * p[1] * square);
    SquaredNorm::vjp(row, f[0], S(df[0] * p[1] * row.input(0)), add);
  }
};

// All numbers that an own score may read: turned rows, features of them, numbers of tokens,
// relative rows, a table of positions.
template <class T>
struct Everything {
  using Transform = Rotation<T>;
  using Features = Mixture;
  Param<T> rise = T(0.3), weight = T(0.1);
  Param<T> rows = Param<T>(std::vector<Index>{1, 7, 5}),
           table = Param<T>({1, 4}, {T(0.1), T(-0.3), T(0.2), T(0.4)});
  std::vector<Index> rows_shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  std::vector<Index> table_shape(const Geometry&) const { return {-1, 4}; }
  static constexpr auto parameters =
      std::tuple{named("rise", &Everything::rise), named("weight", &Everything::weight),
                 tensor("rows", &Everything::rows, &Everything::rows_shape),
                 tensor("table", &Everything::table, &Everything::table_shape)};
  static constexpr auto relative_rows = &Everything::rows;
  static constexpr auto positions = &Everything::table;
  [[nodiscard]] Index bucket(Index distance) const {
    return std::min<Index>(std::abs(distance), 3);
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return math::tanh(pair.logit) * (S(1) + S(0.2) * pair.query[0]) + S(0.3) * pair.key[0] +
           math::sigmoid(S(pair.table + pair.position));
  }
};

// Sets parameters to ordinary values, with `per_head` one for each head.
template <class T>
[[nodiscard]] OwnAttention<Everything, T> everything(const Geometry& g, bool per_head) {
  OwnAttention<Everything, T> op;
  op.score.rows = Param<T>(std::vector<Index>{per_head ? g.heads : 1, 7, g.dim_qk});
  for (Index n = 0; n < op.score.rows.size(); ++n)
    op.score.rows[n] = T(0.5 * std::sin(5 + 3 * double(n)));
  if (!per_head) return op;
  for (Param<T>* param : {&op.score.rise, &op.score.weight, &op.score.log_base}) {
    const T middle = (*param)[0];
    *param = Param<T>(std::vector<Index>{g.heads});
    for (Index h = 0; h < g.heads; ++h) (*param)[h] = middle * T(1 + 0.2 * double(h));
  }
  return op;
}

}  // namespace

TEST_CASE("Hessian-vector products of numbers of tokens are those of differences", "[hvp]") {
  check_masks(OwnAttention<Heated, double>{});
}

TEST_CASE("Hessian-vector products of sums over tokens are those of differences", "[hvp]") {
  check_masks(OwnAttention<Damped, double>{});
}

TEST_CASE("Hessian-vector products of all that a score may read are those of differences",
          "[hvp]") {
  using Op = OwnAttention<Everything, double>;
  check_masks(everything<double>(kHessianSizes, true));
  check_differences(OpCall<Op>(everything<double>(kHessianSizes, false), kHessianSizes));
  const Geometry one{2, 4, 4, 2, 1, 14, 5, 3, 13};
  check_differences(OpCall<Op>(everything<double>(one, true), one));
}

TEST_CASE("Hessian-vector products of numbers that heads share are those of differences", "[hvp]") {
  const auto look = [&]<class Op>(const Op& op) {
    for (const Index heads : {1, 2}) {
      auto numbers = normal_numbers(op, kHessianSizes);
      for (auto* inputs : {&numbers.query_inputs, &numbers.key_inputs})
        inputs->resize(inputs->size() / 4 * std::size_t(heads));
      const OpCall<Op> call(op, kHessianSizes, causal<double>(Align::bottom_right), {.threads = 2},
                            std::move(numbers));
      INFO("heads " << heads);
      check_differences(call);
      check_symmetry(call, 1e-12);
    }
  };
  look(OwnAttention<Heated, double>{});
  look(OwnAttention<Damped, double>{});
}

TEST_CASE(
    "Hessian-vector products of numbers of tokens have the same bits for any number of threads",
    "[hvp]") {
  const Geometry g{2, 4, 4, 2, 37, 61, 6, 5};
  check_threads(OpCall<OwnAttention<Everything, double>>(
      everything<double>(g, false), g, causal<double>(Align::bottom_right), {.key_tile = 8}));
  check_threads(OpCall<OwnAttention<Damped, double>>({}, g, causal<double>()));
}

TEST_CASE("Numbers of hidden tokens leave no trace in Hessian-vector products", "[hvp]") {
  using Op = OwnAttention<Everything, double>;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Geometry g{1, 2, 2, 1, 9, 40, 6, 5};
  bool seen[40];
  for (Index j = 0; j < 40; ++j) seen[j] = j != 4 && j != 17 && j < 31;
  OpCall<Op> call(everything<double>(g, true), g,
                  boolean<double>(TensorView<const bool>(seen, {1, 1, 1, 40})));
  Direction<Op> direction(call, 7);
  const auto clean = run_hvp(call, direction);
  for (Index j = 0; j < 40; ++j)
    for (Index h = 0; h < 2 && !seen[j]; ++h) {
      const auto at = std::size_t(h * 40 + j);
      call.key_inputs[at] = direction.key_inputs[at] = nan;
    }
  CHECK(run_hvp(call, direction) == clean);
}

TEST_CASE("hvp() writes the products that are asked for, and apart from what it reads", "[hvp]") {
  using Op = OwnAttention<Heated, double>;
  const Geometry g{1, 2, 2, 1, 5, 7, 4, 4};
  OpCall<Op> call({}, g);
  Direction<Op> direction(call, 7);
  const auto all = run_hvp(call, direction);
  const Tangents<double> d = direction.tangents(call);
  std::vector<double> query(call.query.size()), inputs(call.key_inputs.size());
  const auto run = [&](const Gradients<double>& to) {
    hvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), call.grad_out_view(), d,
        StoredView<const double>(direction.grad_out.data(), g.out_shape()), to, nullptr,
        &direction.op);
  };
  run({{query.data(), g.query_shape()}});
  CHECK(query == all.query);
  Gradients<double> to;
  to.key_inputs = {inputs.data(), {1, 2, 7, 1}};
  run(to);
  CHECK(inputs == all.key_inputs);
  to.key_inputs = {direction.key_inputs.data(), {1, 2, 7, 1}};
  CHECK(message_of([&] { run(to); }) ==
        "heed::hvp: grad_key_inputs overlaps the tangent of key_inputs");
  to.key_inputs = {inputs.data(), {1, 2, 7, 1}};
  Inputs<double> in = call.inputs();
  in.key_inputs = {};
  CHECK(message_of([&] {
          hvp(call.op, in, call.mask, call.saved, call.out_view(), call.grad_out_view(), {}, {},
              to);
        }) ==
        "heed::hvp: the op needs the input key_inputs of shape (1,2,7,1), or of 1 head, as "
        "key_inputs; none was given");
}
