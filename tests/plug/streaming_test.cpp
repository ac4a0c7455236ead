// SPDX-License-Identifier: Apache-2.0
// Own streaming normalisers, lse as a result, and readouts that read it: each against its
// reference, under every mask, at short and long lengths.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_check.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/streaming.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

// weight_j = exp(s_j) / (exp(sink) + sum_k exp(s_k)), a learnt sink per head.
template <class Real>
struct SinkSoftmax : Softmax<Real> {
  using Base = Softmax<Real>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  Param<Real> sink = Real(0);
  static constexpr auto parameters = std::tuple{named("sink", &SinkSoftmax::sink)};

  State begin(const Queries& queries) const { return Base::begin_with(sink.head(queries.head)); }
  // dL/dsink = -sum_i exp(sink - lse_i) delta_i
  void vjp(const Queries& queries, const State& state, P delta, SinkSoftmax& grad) const {
    const P share = Base::weight(state, P(sink.head(queries.head))) * Base::finish(state);
    grad.sink.head(queries.head) -= Real(sum_valid_lanes(P(share * delta), 0, queries.valid));
  }
  template <class S>
  std::vector<S> reference(LongHandRow<S> row) const {
    row.scores[0].push_back(sink.head(row.head));
    std::vector<S> weights = long_hand_softmax(row.scores[0]);
    weights.pop_back();
    return weights;
  }
  template <class S>
  S reference_lse(LongHandRow<S> row, std::size_t) const {
    row.scores[0].push_back(sink.head(row.head));
    return log_sum_exp(row.scores[0]);
  }
};

// weight_j = sigmoid(s_j + shift): no row is normalised.
template <class Real>
struct Sigmoids : StreamedRows<Real> {
  using Base = StreamedRows<Real>;
  using typename Base::P, typename Base::State;
  Real shift = Real(-2);
  static constexpr auto parameters = std::tuple{option("shift", &Sigmoids::shift)};

  P weight(const State&, P score) const { return math::sigmoid(P(score + P(shift))); }
  P dscore(const State&, P, P weight, P pull, P) const {
    return weight * (P(Real(1)) - weight) * pull;
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (const S& s : row.scores[0]) weights.push_back(math::sigmoid(S(s + S(shift))));
    return weights;
  }
};

// weight_j = relu(s_j)^2 / n, n the number of keys that the query sees.
template <class Real>
struct SquaredRelu : StreamedRows<Real, 1> {
  static constexpr bool counts_visible = true;
  using Base = StreamedRows<Real, 1>;
  using typename Base::P, typename Base::State, typename Base::Queries;

  State begin(const Queries& queries) const { return {P(Real(0)), {queries.visible}}; }
  P weight(const State&, P score) const {
    const P positive = max(score, P(Real(0)));
    return positive * positive;
  }
  P finish(const State& state) const { return inverse_or_zero(state.own[0]); }
  P dscore(const State& state, P score, P, P pull, P) const {
    return Real(2) * max(score, P(Real(0))) * finish(state) * pull;
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (const S& s : row.scores[0])
      weights.push_back(math::value_of(s) > 0 ? S(s * s / S(double(row.keys.size()))) : S(0));
    return weights;
  }
};

// out = mixed * sigmoid(lse): a row that matches no key is small.
template <class Real>
struct LoudRows : PlainReadout {
  static constexpr bool saves_mixed = true, uses_lse = true;
  using P = Pack<Real>;

  void forward(const ReadoutPanel<Real>& panel) const {
    for (int v = 0; v < panel.vectors; ++v)
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, panel.tile.load(c, v) * math::sigmoid(panel.lse.load(0, v)));
  }
  void vjp(const ReadoutPanel<Real>& panel, LoudRows&) const {
    for (int v = 0; v < panel.vectors; ++v) {
      const P gate = math::sigmoid(panel.lse.load(0, v));
      P pull = Real(0);
      for (Index c = 0; c < panel.tile.rows; ++c) {
        pull += panel.tile.load(c, v) * panel.saved.load(c, v);
        panel.tile.store(c, v, panel.tile.load(c, v) * gate);
      }
      panel.dlse.add(0, v, pull * gate * (P(Real(1)) - gate));
    }
    lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(ReadoutContext<S>& all) const {
    for (std::size_t n = 0; n < all.out.size(); ++n)
      all.out[n] = all.out[n] * math::sigmoid(all.lse[0][n / std::size_t(all.geometry.dim_v)]);
  }
};

template <class Real, template <class> class Normaliser, template <class> class Readout = Identity>
using With = Attention<Real, DotScore<Real>, Normaliser<Real>, Readout<Real>>;

template <class Op>
void check(const Op& op) {
  // Few queries, several panels, and tiles beyond the first.
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 70, 150, 6, 3}}) {
    const OpReport report = check_op(op, g, {.max_entries_per_tensor = 6});
    INFO(report.text());
    CHECK(report.passed());
  }
}

[[nodiscard]] bool says(const std::string& message, const char* part) {
  INFO(message);
  return message.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("Streaming normalisers of one's own agree with their twins", "[plug]") {
  SECTION("sink") {
    With<double, SinkSoftmax> op;
    op.normaliser.sink = {0.5, -1.0, 2.0, 0.0};
    const OpReport report = check_op(op);
    INFO(report.text());
    CHECK(report.passed());
    op.normaliser.sink = 30.0;  // above every score
    check(op);
  }
  SECTION("sigmoid") { check(With<double, Sigmoids>{}); }
  SECTION("squared relu over the count of visible keys") { check(With<double, SquaredRelu>{}); }
}

TEST_CASE("lse has a gradient", "[plug]") {
  SECTION("plain") { check(With<double, Softmax>{}); }
  SECTION("dar") { check(Dar<double>{}); }
  SECTION("differential, two of them") { check(Differential<double>{}); }
  SECTION("read by the readout") { check(With<double, Softmax, LoudRows>{}); }
  SECTION("read by the readout, with a sink") { check(With<double, SinkSoftmax, LoudRows>{}); }
}

TEST_CASE("forward writes lse where it is asked to", "[plug]") {
  const Geometry g{2, 4, 4, 2, 37, 50, 8, 8};
  const auto compare = [&](auto op, const Mask<float>& mask) {
    using Op = decltype(op);
    constexpr int maps = Op::NormaliserType::maps;
    OpCall<Op> call(op, g, mask);
    call.forward();
    // Rows of lse with a gap between them, and one number more in front.
    const Index rows = g.query_rows();
    std::vector<float> memory(std::size_t(1 + rows * (maps + 3)), -7.0F);
    const TensorView<float> lse(memory.data() + 1, call.lse_shape(),
                                {g.heads * g.len_q * (maps + 3), g.len_q * (maps + 3), maps + 3});
    forward(op, call.inputs(), mask, {call.out_view(), lse});
    for (Index row = 0; row < rows; ++row) {
      for (int m = 0; m < maps; ++m)
        CHECK(memory[std::size_t(1 + row * (maps + 3) + m)] ==
              call.saved.lse[std::size_t(m * rows + row)]);
      CHECK(memory[std::size_t(1 + row * (maps + 3) + maps)] == -7.0F);
    }
  };
  compare(ScaledDot<float>{}, {});
  compare(ScaledDot<float>{}, causal<float>());
  compare(ScaledDot<float>{}, key_lengths<float>({0, 3}));  // rows that see no key
  compare(Differential<float>{}, causal<float>());

  SECTION("one query per head, whose heads are folded") {
    OpCall<ScaledDot<float>> call({}, {2, 4, 4, 2, 1, 50, 8, 8});
    call.lse.assign(8, 0);
    call.forward();
    CHECK(call.lse == call.saved.lse);
  }
}

TEST_CASE("A gradient of lse is refused where there is none", "[plug]") {
  OpCall<ResonantOde<float>> call({}, {1, 1, 1, 1, 5, 5, 4, 4});
  call.forward();
  call.grad_lse.assign(5, 1.0F);
  CHECK(says(message_of([&] { call.backward(); }),
             "grad_lse was given, the op's normaliser has no derivative of lse"));
  OpCall<ScaledDot<float>> plain({}, {1, 1, 1, 1, 5, 5, 4, 4});
  plain.forward();
  plain.grad_lse.assign(5, 1.0F);
  const TensorView<const float> wrong(plain.grad_lse.data(), Shape{1, 1, 4, 1});
  const auto short_gradient = [&] {
    backward(plain.op, plain.inputs(), {}, plain.saved, plain.out_view(),
             {plain.grad_out_view(), wrong}, {});
  };
  CHECK(says(message_of(short_gradient), "grad_lse has shape (1,1,4,1), it must be (1,1,5,1)"));
}
