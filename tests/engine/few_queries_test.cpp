// SPDX-License-Identifier: Apache-2.0
// Panels of few queries read keys and values together. A query has the bits that it has alone, and keeps them on any
// number of threads.

#include "conformance/compare.hpp"

using namespace heed_test;

namespace {

// Forward of `op` for all queries together and for each alone, in tiles of the same size.
template <class Op>
void check_alone(const Op& op, Index len_q) {
  using T = typename Op::Scalar;
  const Geometry g = geometry(2, 6, 2, len_q, 3 * heed::kLanes<T> + 5, 19, 21);
  const Call<T> call = random_call<T>(g, 0);
  heed::Options options;
  options.key_tile = 2 * heed::kLanes<T>;
  options.panel_vectors = 1;
  Tensor<T> together(call.grad_out.shape()), alone(call.grad_out.shape()),
      threads(call.grad_out.shape());
  heed::forward(op, call.inputs(), {}, together.view(), nullptr, options);
  const auto row = [](const auto& view, Index t) {
    Shape shape = view.shape();
    shape.len = 1;
    return std::remove_cvref_t<decltype(view)>(view.row(0, 0, t), shape, view.strides());
  };
  for (Index t = 0; t < len_q; ++t) {
    const heed::TensorView<const T> query = row(call.query.view(), t);
    heed::forward(op, {query, call.key.view(), call.value.view()}, {}, row(alone.view(), t),
                  nullptr, options);
  }
  INFO("len_q " << len_q);
  CHECK(same_bits(together.dense(), alone.dense()));
  options.threads = 3;
  heed::forward(op, call.inputs(), {}, threads.view(), nullptr, options);
  CHECK(same_bits(together.dense(), threads.dense()));
}

// A softmax whose heads take the keys of all key-value heads in turn.
struct KeysInTurn : heed::Softmax<float> {
  [[nodiscard]] heed::Source source(const Geometry& g, Index h, int) const {
    return {h, h % g.kv_heads, 0, 0, g.dim_qk};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("a query beside others has the bits that it has alone", "[few_queries]", float,
                   double) {
  heed::Dar<TestType> dar;
  dar.score.strength = {TestType(0.1), TestType(0.9), TestType(-0.5),
                        TestType(0.7), TestType(1.5), TestType(0.2)};
  for (const Index len_q : {1, 2, 3, 5, 8, 9, 16, 19}) {
    // A panel of more queries takes another way, whose sums have another order.
    if (std::min(len_q, Index(heed::kLanes<TestType>)) > heed::kFewRows<TestType>) continue;
    check_alone(heed::ScaledDot<TestType>{}, len_q);
    check_alone(dar, len_q);
  }
}

TEST_CASE("heads of a group that read keys of other heads read their own", "[few_queries]") {
  const Geometry shared = geometry(1, 6, 3, 2, 29, 8, 8), apart = geometry(1, 6, 6, 2, 29, 8, 8);
  const Call<float> call = random_call<float>(shared, 0);
  Call<float> each = random_call<float>(apart, 0);
  for (Index h = 0; h < 6; ++h)
    for (Index t = 0; t < 29; ++t)
      for (Index c = 0; c < 8; ++c) {
        each.key(0, h, t, c) = call.key(0, h % 3, t, c);
        each.value(0, h, t, c) = call.value(0, h / 2, t, c);
      }
  const heed::Attention<float, heed::DotScore<float>, KeysInTurn, heed::Identity<float>> in_turn;
  Tensor<float> out(call.grad_out.shape()), wanted(call.grad_out.shape());
  heed::forward(in_turn, call.inputs(), {}, out.view());
  heed::forward(heed::ScaledDot<float>{}, {call.query.view(), each.key.view(), each.value.view()},
                {}, wanted.view());
  CHECK(same_bits(out.dense(), wanted.dense()));
}
