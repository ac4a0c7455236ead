// SPDX-License-Identifier: Apache-2.0
// One call of an op: its own memory, the caller's memory, and gradients by name.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/ops/intent_gate.hpp>

#include <cmath>

using namespace heed;
using heed_test::message_of;

namespace {

constexpr Geometry kG{.batch = 2,
                      .heads = 4,
                      .query_heads = 4,
                      .kv_heads = 2,
                      .len_q = 5,
                      .len_kv = 7,
                      .dim_qk = 3,
                      .dim_v = 6};

[[nodiscard]] IntentGated<double> gated() {
  IntentGated<double> op;
  op.readout.bias = Param<double>(0.25);
  return op;
}

[[nodiscard]] std::vector<std::string> names_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& tensor : tensors) names.push_back(tensor.name);
  return names;
}
[[nodiscard]] const std::vector<double>& named(const std::vector<NamedTensor>& tensors,
                                               const std::string& name) {
  for (const NamedTensor& tensor : tensors)
    if (tensor.name == name) return tensor.values;
  FAIL("there is no " << name);
  return tensors.front().values;
}

}  // namespace

TEST_CASE("a call on its own memory returns every gradient under the name of its tensor") {
  const std::vector<double> bias(std::size_t(kG.len_q * kG.len_kv), 0.5);
  const Mask<double> mask =
      heed::bias<double>(TensorView<const double>(bias.data(), {1, 1, kG.len_q, kG.len_kv}));
  OpCall call(gated(), kG, mask);
  CHECK(std::isnan(call.out.front()));
  CHECK(call.grad_query.empty());
  call.forward();
  call.backward();

  const std::vector<NamedTensor> tensors = call.tensors(), gradients = call.gradients();
  CHECK(names_of(tensors) ==
        std::vector<std::string>{"query", "key", "value", "extra", "bias", "readout.gate.bias"});
  CHECK(names_of(gradients) == names_of(tensors));
  for (const NamedTensor& tensor : tensors) {
    INFO(tensor.name);
    const std::vector<double>& gradient = named(gradients, tensor.name);
    CHECK(gradient.size() == tensor.values.size());
    for (const double x : gradient) CHECK(std::isfinite(x));
  }
  CHECK(named(tensors, "extra") == call.extra);
  CHECK(named(tensors, "bias") == bias);
  CHECK(named(gradients, "value") == call.grad_value);
  CHECK(named(gradients, "bias") == call.grad_bias);

  const auto slow = reference::gradients(call.op, problem_of<double>(call), call.grad_out);
  for (std::size_t i = 0; i < slow.dextra.size(); ++i)
    CHECK(call.grad_extra[i] == Approx(slow.dextra[i]));
}

TEST_CASE("a call on the caller's memory, in any layout, has the bits of one on its own") {
  OpCall own(gated(), kG, causal<double>());
  own.forward();
  own.backward();

  // (batch, len, heads, dim)
  const Shape q = kG.query_shape();
  std::vector<double> query(own.query.size());
  const auto at = [&](double* data) { return view_bthd(data, q.batch, q.len, q.heads, q.dim); };
  const TensorView<double> moved = at(query.data());
  const Inputs<double> in = own.inputs();
  for (Index b = 0; b < q.batch; ++b)
    for (Index h = 0; h < q.heads; ++h)
      for (Index t = 0; t < q.len; ++t)
        for (Index c = 0; c < q.dim; ++c) moved(b, h, t, c) = in.query(b, h, t, c);

  std::vector<double> out(own.out.size()), grad_query(query.size());
  const CallViews<double> tensors{{moved, in.key, in.value, in.extra},
                                  {out.data(), kG.out_shape()},
                                  own.grad_out_view(),
                                  {at(grad_query.data())}};
  OpCall call(gated(), tensors, causal<double>());
  CHECK(call.geometry() == kG);
  call.forward();
  call.backward();
  CHECK(out == own.out);
  CHECK(names_of(call.gradients()) == std::vector<std::string>{"query", "readout.gate.bias"});
  CHECK(named(call.gradients(), "query") == own.grad_query);
  CHECK(call.grad_op.readout.bias[0] == own.grad_op.readout.bias[0]);
  CHECK(named(call.tensors(), "query") == own.query);
  CHECK(problem_of<double>(call).query == own.query);
}

TEST_CASE("forward alone saves nothing, and numbers of another size are refused") {
  OpCall call(gated(), kG);
  call.infer();
  CHECK(call.saved.lse.empty());
  CHECK_THROWS_AS(call.backward(), std::invalid_argument);
  const std::vector<double> out = call.out;
  call.forward();
  CHECK(out == call.out);

  CallNumbers<double> numbers = normal_numbers(gated(), kG);
  numbers.key.pop_back();
  CHECK(message_of([&] { OpCall<IntentGated<double>>(gated(), kG, {}, {}, numbers); }) ==
        "OpCall: key has 83 numbers, its shape is (2,2,7,3)");
}
