// SPDX-License-Identifier: Apache-2.0
// Readouts given by forward(row) alone, and transformed values: against the reference and difference quotients, and against a
// readout by hand; rows of the query's own token from caches, pages and key ranges of other lengths.

#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/kv_cache.hpp>
#include <heed/plug/readout_formula.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

template <class T, class Readout>
using Op = Attention<T, DotScore<T>, Softmax<T>, Readout>;

// A formula with every word of a row but those of tokens.
template <class T>
struct Everything : FormulaReadout {
  static constexpr bool uses_own_rows = true, uses_query = true, uses_extra = true, uses_lse = true;
  Param<T> height = T(0.3), bends, of_query, of_value;
  std::vector<Index> bends_shape(const Geometry&) const { return {3}; }
  std::vector<Index> query_shape(const Geometry& g) const { return {g.heads, g.dim_qk}; }
  std::vector<Index> value_shape(const Geometry& g) const { return {1, g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{named("height", &Everything::height),
                 tensor("bends", &Everything::bends, &Everything::bends_shape),
                 tensor("of_query", &Everything::of_query, &Everything::query_shape),
                 tensor("of_value", &Everything::of_value, &Everything::value_shape)};
  [[nodiscard]] Index extra_dim(const Geometry& g) const { return g.dim_v; }

  auto forward(const auto& row) const {
    const auto y = row.mixed(), v = row.own_value();
    const auto near = math::tanh(row.sum(row.query() * row.own_key() * row.learnt_row(of_query)));
    const auto top = row.largest(row.query());
    const auto e = math::exp(row.query() - top);
    const auto flat = 1 / row.sum(e * e / (row.sum(e) * row.sum(e)));
    const auto kept = row.keep(y * row.extra() + row.learnt_row(of_value));
    const auto of_row = near * row.learnt(height) + row.learnt(bends, 2) * math::tanh(flat) +
                        0.01 * row.query_index() + 0.1 * math::sigmoid(row.lse()) +
                        row.extra(1) * row.sum(1) / 50 + double(row.head());
    return kept * math::sigmoid(kept) + of_row * y - math::select(v > 0, v, 0.2 * v);
  }
};
template <class T>
Op<T, Everything<T>> everything(const Geometry& g) {
  Op<T, Everything<T>> op;
  const auto fill = [](std::vector<Index> shape) {
    Param<T> of(std::move(shape));
    for (Index n = 0; n < of.size(); ++n) of[n] = T(std::cos(double(n + 1)));
    return of;
  };
  op.readout.bends = fill({3});
  op.readout.of_query = fill({g.heads, g.dim_qk});
  op.readout.of_value = fill({1, g.dim_v});
  return op;
}

// A gate of numbers that the call brings for each token.
template <class T>
struct Gates : FormulaReadout {
  static constexpr int query_inputs = 2;
  auto forward(const auto& row) const {
    return math::sigmoid(row.query_input(1)) * row.mixed() + row.query_input(0);
  }
};

// exp of the values, and log of what they are mixed to.
template <class T>
struct LogMean : FormulaReadout {
  static constexpr bool uses_own_rows = true;
  auto value(const auto& x) const { return math::exp(x); }
  auto forward(const auto& row) const {
    return math::log(row.mixed() + 0.25 * row.own_value() + 1);
  }
};

// What a row mixes has no part along the value of its own token: by formula, and by hand.
template <class T>
struct Exclusive : FormulaReadout {
  static constexpr bool uses_own_rows = true;
  auto forward(const auto& row) const {
    const auto y = row.mixed(), v = row.own_value();
    return y - row.sum(y * v) / math::maximum(row.sum(v * v), 1e-24) * v;
  }
};
template <class T>
struct ExclusiveByHand : PlainReadout {
  using P = Pack<T>;
  static constexpr bool uses_own_rows = true, saves_mixed = true;
  void forward(const ReadoutPanel<T>& panel) const {
    for (int i = 0; i < panel.vectors; ++i) {
      const P f = dot(panel.tile, panel.own_value, i) * inverse(panel, i);
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, i, panel.tile.load(c, i) - f * panel.own_value.load(c, i));
    }
  }
  // With f = (y.v) / (v.v) and h = (g.v) / (v.v): dy = g - h v, dv = 2 f h v - f g - h y
  void vjp(const ReadoutPanel<T>& panel, ExclusiveByHand&) const {
    for (int i = 0; i < panel.vectors; ++i) {
      const P in = inverse(panel, i), f = dot(panel.saved, panel.own_value, i) * in,
              h = dot(panel.tile, panel.own_value, i) * in;
      for (Index c = 0; c < panel.tile.rows; ++c) {
        const P v = panel.own_value.load(c, i), g = panel.tile.load(c, i);
        panel.down_value.add(c, i, T(2) * f * h * v - f * g - h * panel.saved.load(c, i));
        panel.tile.store(c, i, g - h * v);
      }
    }
    lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }

 private:
  [[nodiscard]] static P dot(const LaneTile<const T>& a, const LaneTile<const T>& b, int i) {
    return math::dot_product(
        a.rows, [&](Index c) { return a.load(c, i); }, [&](Index c) { return b.load(c, i); });
  }
  [[nodiscard]] static P inverse(const ReadoutPanel<T>& panel, int i) {
    return P(T(1)) / max(dot(panel.own_value, panel.own_value, i), P(T(1e-24)));
  }
};

// Throws the sentence of a formula that is called once.
template <class Readout>
std::string refusal(const Op<double, Readout>& op) {
  const Geometry g{1, 2, 2, 1, 4, 4, 4, 3};
  return message_of([&] {
    OpCall<Op<double, Readout>> call(op, g, causal<double>());
    call.forward();
  });
}

// Numbers of a tensor (batch, heads, len, dim).
std::vector<float> numbers(const Shape& s, double by) {
  std::vector<float> x(std::size_t(s.batch * s.heads * s.len * s.dim));
  for (std::size_t n = 0; n < x.size(); ++n) x[n] = float(std::sin(by * double(n + 1)));
  return x;
}
[[nodiscard]] double difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t n = 0; n < a.size(); ++n)
    most = std::max(most, std::abs(double(a[n]) - double(b[n])));
  return most;
}

}  // namespace

TEST_CASE("formulas of a query's row agree with the reference and difference quotients",
          "[readout_formula]") {
  for (const Geometry& g : {Geometry{2, 4, 4, 2, 5, 5, 4, 6}, Geometry{1, 2, 2, 1, 19, 37, 9, 7}}) {
    check_passes(everything<double>(g), g, 12);
    check_passes(Op<double, Gates<double>>{}, g, 12);
    check_passes(Op<double, LogMean<double>>{}, g, 12);
  }
}

TEST_CASE("formulas of a query's row have the same bits on any number of threads",
          "[readout_formula]") {
  const Geometry g{2, 4, 4, 2, 70, 90, 8, 9};
  Geometry later = g;
  later.first_query = 20;
  for (const Geometry& sizes : {g, later}) {
    check_bits_on_threads(
        OpCall<Op<float, Everything<float>>>(everything<float>(g), sizes, causal<float>()));
    check_bits_on_threads(
        OpCall<Op<float, LogMean<float>>>(Op<float, LogMean<float>>{}, sizes, causal<float>()));
  }
}

TEST_CASE("a readout's formula has the derivative that its author would write by hand",
          "[readout_formula]") {
  for (const Index first : {0, 13, 64}) {
    Geometry g{2, 4, 4, 2, 67, 150, 8, 11};
    g.first_query = first;
    // Small tiles, so that the own rows of a panel lie in two of them.
    OpCall<Op<double, Exclusive<double>>> formula({}, g, causal<double>(),
                                                  {.key_tile = 1, .panel_vectors = 1});
    OpCall<Op<double, ExclusiveByHand<double>>> by_hand({}, g, causal<double>());
    const auto a = results_of(formula), b = results_of(by_hand);
    REQUIRE(a.size() == b.size());
    for (std::size_t t = 0; t < a.size(); ++t)
      for (std::size_t n = 0; n < a[t].values.size(); ++n)
        if (!(std::abs(a[t].values[n] - b[t].values[n]) < 1e-12)) {
          FAIL_CHECK(a[t].name << "[" << n << "]: " << a[t].values[n] << ", " << b[t].values[n]
                               << ", first_query " << first);
          break;
        }
  }
}

TEST_CASE("own rows lie at the queries' positions, in caches of any storage and on any page",
          "[readout_formula]") {
  constexpr Index heads = 4, kv_heads = 2, len = 150, d = 8;
  const Op<float, Exclusive<float>> op;
  const Shape of_query{1, heads, len, d}, of_key{1, kv_heads, len, d};
  const std::vector<float> query = numbers(of_query, 0.7), key = numbers(of_key, 0.3),
                           value = numbers(of_key, 1.1);
  const auto bottom = causal<float>(Align::bottom_right);
  std::vector<float> whole(query.size()), steps(query.size());
  forward(op, Inputs<float>{{query.data(), of_query}, {key.data(), of_key}, {value.data(), of_key}},
          bottom, TensorView(whole.data(), of_query));

  const auto decode = [&](auto& cache) {
    for (const Index count : {70, 1, 60, 1, 18}) {
      const Index done = cache.len();
      const auto part = [&](auto* of, Index h) {
        return TensorView(of + done * d, {1, h, count, d}, {h * len * d, len * d, d});
      };
      cache.append(part(key.data(), kv_heads), part(value.data(), kv_heads));
      forward(op, cache.inputs(part(query.data(), heads)), bottom, part(steps.data(), heads));
    }
  };
  KvCache<float> plain(1, kv_heads, d, d, kPanelLanes<float>);
  decode(plain);
  CHECK(difference(steps, whole) < 2e-6);
  KvCache<bfloat16> narrow(1, kv_heads, d, d, kPanelLanes<float>);
  decode(narrow);
  CHECK(difference(steps, whole) < 0.05);
  // A step on the last token reads its rounded value: what is left has no part along it.
  const std::vector<float> y(steps.end() - d, steps.end());
  double along = 0, size = 0;
  for (Index c = 0; c < d; ++c) {
    const double v = narrow.values()(0, kv_heads - 1, len - 1, c);
    along += double(y[std::size_t(c)]) * v;
    size += v * v;
  }
  CHECK(std::abs(along) / size < 1e-5);
}

TEST_CASE("rows without a key keep what their formula makes of zeros, and pass nothing on",
          "[readout_formula]") {
  const Geometry g{1, 2, 2, 1, 3, 3, 4, 4};
  OpCall<Op<double, Exclusive<double>>> call({}, g, key_lengths<double>({0}));
  call.forward();
  call.backward();
  for (const double x : call.out) CHECK(x == 0.0);
  for (const NamedTensor& gradient : call.gradients())
    for (const double x : gradient.values) CHECK(x == 0.0);
  // A value of zero takes nothing away.
  OpCall<Op<double, Exclusive<double>>> zero({}, g, causal<double>());
  std::fill(zero.value.begin(), zero.value.begin() + g.dim_v, 0.0);
  OpCall<Op<double, Identity<double>>> plain({}, g, causal<double>());
  plain.value = zero.value;
  zero.forward();
  zero.backward();
  plain.forward();
  for (Index c = 0; c < g.dim_v; ++c) CHECK(zero.out[std::size_t(c)] == plain.out[std::size_t(c)]);
  for (const NamedTensor& gradient : zero.gradients())
    for (const double x : gradient.values) CHECK(std::isfinite(x));
}

namespace {

template <class T>
struct Mismatched : FormulaReadout {
  static constexpr bool uses_query = true;
  auto forward(const auto& row) const { return row.mixed() + row.query(); }
};
template <class T>
struct QueryOut : FormulaReadout {
  static constexpr bool uses_query = true;
  auto forward(const auto& row) const { return 2 * row.query(); }
};
template <class T>
struct Unnamed : FormulaReadout {
  Param<T> hidden = T(1);
  auto forward(const auto& row) const { return row.learnt(hidden) * row.mixed(); }
};
template <class T>
struct FarEntry : FormulaReadout {
  Param<T> factor = T(1);
  static constexpr auto parameters = std::tuple{named("factor", &FarEntry::factor)};
  auto forward(const auto& row) const { return row.learnt(factor, 9) * row.mixed(); }
};
template <class T>
struct FlatRow : FormulaReadout {
  Param<T> factor = T(1);
  static constexpr auto parameters = std::tuple{named("factor", &FlatRow::factor)};
  auto forward(const auto& row) const { return row.learnt_row(factor) * row.mixed(); }
};

}  // namespace

TEST_CASE("formulas that put together what does not fit end in one sentence", "[readout_formula]") {
  CHECK(refusal(Op<double, Mismatched<double>>{}).find("columns of 3 and 4 numbers") !=
        std::string::npos);
  CHECK(refusal(Op<double, QueryOut<double>>{}).find("returns 4 columns, the output has 3") !=
        std::string::npos);
  CHECK(refusal(Op<double, Unnamed<double>>{}).find("`parameters` does not name") !=
        std::string::npos);
  CHECK(refusal(Op<double, FarEntry<double>>{}).find("asks for entry 9") != std::string::npos);
  CHECK(refusal(Op<double, FlatRow<double>>{}).find("must be (heads or 1, columns)") !=
        std::string::npos);
  Geometry late{1, 1, 1, 1, 4, 5, 3, 3};
  late.first_query = 2;
  const std::string said = message_of([&] {
    OpCall<Op<double, Exclusive<double>>> call({}, late);
    call.forward();
  });
  CHECK(said.find("queries stand at [2, 6), keys [0, 5) of 5 are at hand") != std::string::npos);
}
