// SPDX-License-Identifier: Apache-2.0
// libheed beside the calls of C++: the same numbers, the same sentences, the same list of variants, with every instruction
// set that the library and this processor have.

#include "catch.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"

#include <heed/c.h>
#include <heed/check/op_call.hpp>
#include <heed/compiled.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <vector>

using namespace heed;
using heed_test::message_of;

namespace {

template <class Struct>
[[nodiscard]] Struct sized() {
  Struct s{};
  s.size = sizeof s;
  return s;
}

// DLTensors, at places that stay.
class Tensors {
 public:
  template <class Real>
  const DLTensor* of_axes(const Real* data, std::vector<std::int64_t> shape) {
    Axes& axes = all_.emplace_back();
    axes.shape = std::move(shape);
    axes.tensor.data = const_cast<Real*>(data);
    axes.tensor.device = {kDLCPU, 0};
    axes.tensor.ndim = int(axes.shape.size());
    axes.tensor.dtype = {kDLFloat, 8 * sizeof(Real), 1};
    axes.tensor.shape = axes.shape.data();
    return &axes.tensor;
  }
  template <class Real>
  const DLTensor* dense(const Real* data, const Shape& s) {
    return of_axes(data, {s.batch, s.heads, s.len, s.dim});
  }

 private:
  struct Axes {
    std::vector<std::int64_t> shape;
    DLTensor tensor{};
  };
  std::deque<Axes> all_;
};

// The learnt parameters of an op as C's, and memory for their gradients.
template <class Real>
struct LearntParameters {
  std::vector<heed_parameter> given, gradients;
  std::deque<std::vector<double>> numbers;

  template <class Op>
  LearntParameters(const Op& op, Tensors& tensors) {
    for_each_param(op, [&](const char* name, const Param<Real>& param) {
      const std::vector<std::int64_t> shape(param.shape().begin(), param.shape().end());
      given.push_back({name, tensors.of_axes(param.data(), shape), nullptr, 0});
      numbers.emplace_back(std::size_t(param.size()), std::nan(""));
      gradients.push_back({name, tensors.of_axes(numbers.back().data(), shape), nullptr, 0});
    });
  }
};

// Relative to the largest number: other instruction sets add in another order, and gradients of parameters are sums over
// all pairs.
template <class Real>
void check_near(const std::vector<Real>& got, const std::vector<Real>& wanted, const char* what) {
  REQUIRE(got.size() == wanted.size());
  double largest = 1, worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(double(wanted[i])));
    worst = std::max(worst, std::abs(double(got[i]) - double(wanted[i])));
    if (!(std::abs(double(got[i]) - double(wanted[i])) >= 0)) worst = INFINITY;  // NaN
  }
  INFO(what << ": off by " << worst << ", the largest is " << largest);
  CHECK(worst <= largest * (sizeof(Real) == 4 ? 1e-5 : 1e-12));
}

// Runs f for each instruction set that runs here.
template <class F>
void on_each_set(F&& f) {
  for (std::size_t n = 0; heed_instructions_name(n) != nullptr; ++n) {
    if (heed_use_instructions(heed_instructions_name(n)) != heed_ok) continue;
    INFO(heed_instructions());
    f();
  }
  CHECK(heed_use_instructions(nullptr) == heed_ok);
}

// The sum of the products of two dense tensors' numbers; 0 where one is not there.
[[nodiscard]] double product(const DLTensor* a, const DLTensor* b) {
  if (a == nullptr || b == nullptr) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < a->ndim; ++axis) count *= a->shape[axis];
  const auto number = [](const DLTensor* x, std::int64_t n) {
    return x->dtype.bits == 64 ? static_cast<const double*>(x->data)[n]
                               : double(static_cast<const float*>(x->data)[n]);
  };
  double sum = 0;
  for (std::int64_t n = 0; n < count; ++n) sum += number(a, n) * number(b, n);
  return sum;
}
[[nodiscard]] double product(const heed_gradients& g, const heed_tangents& d) {
  double sum = product(g.query, d.query) + product(g.key, d.key) + product(g.value, d.value) +
               product(g.extra, d.extra) + product(g.bias, d.bias);
  for (std::size_t n = 0; n < d.parameter_count; ++n)
    sum += product(g.parameters[n].tensor, d.parameters[n].tensor);
  return sum;
}

// `to` holds the gradients of heed_backward(). What moves moves along itself. That heed_jvp() is the transpose of
// heed_backward(), a Hessian its own, and a gradient linear in grad_out finds each tensor that is taken for another.
template <class Real>
void check_tangents(const heed_call& call, const heed_saved* saved, const DLTensor* out,
                    const DLTensor* out_tangent, const DLTensor* grad_out,
                    const heed_gradients& to) {
  const auto near = [](double a, double b) {
    return std::abs(a - b) <=
           std::max({1.0, std::abs(a), std::abs(b)}) * (sizeof(Real) == 4 ? 1e-3 : 1e-10);
  };
  auto all = sized<heed_tangents>(), of_query = all, nothing = all;
  all.query = of_query.query = call.query;
  all.key = call.key;
  all.value = call.value;
  all.extra = call.extra;
  all.bias = call.mask->bias;
  all.parameters = call.parameters;
  all.parameter_count = call.parameter_count;
  heed_tangents others = all;
  others.query = nullptr;
  auto moved = sized<heed_outputs>();
  moved.out = out_tangent;
  const double slope = product(to, all);
  REQUIRE(heed_jvp(&call, saved, out, &all, &moved) == heed_ok);
  CHECK(near(product(out_tangent, grad_out), slope));

  const int status = heed_hvp(&call, saved, out, grad_out, &of_query, nullptr, &to);
  const std::string name = call.variant;
  if (name != "sdpa" && name.substr(0, 3) != "dar") {
    CHECK(status == heed_invalid);
    CHECK(std::string(heed_last_error()).find("has no products with its Hessian") !=
          std::string::npos);
    return;
  }
  REQUIRE(status == heed_ok);
  const double mixed = product(to, others);
  REQUIRE(heed_hvp(&call, saved, out, grad_out, &others, nullptr, &to) == heed_ok);
  CHECK(near(product(to, of_query), mixed));
  CHECK(mixed != 0);
  REQUIRE(heed_hvp(&call, saved, out, grad_out, &nothing, grad_out, &to) == heed_ok);
  CHECK(near(product(to, all), slope));
}

// For every variant of the list.
constexpr Geometry kSizes{2, 4, 4, 2, 37, 37, 8, 8};

template <class Op>
void check_variant(const Variant<Op>& variant) {
  using Real = typename Op::Scalar;
  const Geometry& g = variant.geometry;
  std::vector<Real> bias(std::size_t(g.heads * g.len_q * g.len_kv));
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = Real(std::sin(double(i)));
  const Shape bias_shape{1, g.heads, g.len_q, g.len_kv};
  const Mask<Real> mask = causal<Real>() & key_lengths<Real>({37, 20}) &
                          heed::bias<Real>(TensorView<const Real>(bias.data(), bias_shape));
  OpCall<Op> call(variant.op, g, mask);
  call.lse.resize(std::size_t(element_count(call.lse_shape(), "lse")));
  call.forward();
  call.backward();

  Tensors tensors;
  const LearntParameters<Real> learnt(variant.op, tensors);
  const std::vector<std::int64_t> lengths{37, 20};
  auto c_mask = sized<heed_mask>();
  c_mask.causal = 1;
  c_mask.key_lengths = lengths.data();
  c_mask.key_length_count = lengths.size();
  c_mask.bias = tensors.dense(bias.data(), bias_shape);
  auto c_call = sized<heed_call>();
  c_call.variant = variant.name;
  c_call.query = tensors.dense(call.query.data(), g.query_shape());
  c_call.key = tensors.dense(call.key.data(), g.key_shape());
  c_call.value = tensors.dense(call.value.data(), g.value_shape());
  const Shape extra_shape = g.extra_shape(variant.op.extra_dim(g));
  if (!call.extra.empty()) c_call.extra = tensors.dense(call.extra.data(), extra_shape);
  c_call.parameters = learnt.given.data();
  c_call.parameter_count = learnt.given.size();
  c_call.mask = &c_mask;

  auto shapes = sized<heed_shapes>();
  REQUIRE(heed_shapes_of(&c_call, &shapes) == heed_ok);
  CHECK(Shape{shapes.out[0], shapes.out[1], shapes.out[2], shapes.out[3]} == g.out_shape());
  CHECK(Shape{shapes.lse[0], shapes.lse[1], shapes.lse[2], shapes.lse[3]} == call.lse_shape());
  if (!call.extra.empty())
    CHECK(Shape{shapes.extra[0], shapes.extra[1], shapes.extra[2], shapes.extra[3]} == extra_shape);
  else
    CHECK(shapes.extra[3] == 0);

  on_each_set([&] {
    std::vector<Real> out(call.out.size()), lse(call.lse.size()), query(call.query.size()),
        key(call.key.size()), value(call.value.size()), extra(call.extra.size()),
        by_bias(bias.size());
    auto outputs = sized<heed_outputs>();
    outputs.out = tensors.dense(out.data(), g.out_shape());
    outputs.lse = tensors.dense(lse.data(), call.lse_shape());
    heed_saved* saved = nullptr;
    INFO(heed_last_error());
    REQUIRE(heed_forward(&c_call, &outputs, &saved) == heed_ok);
    auto from = sized<heed_outputs>();
    from.out = tensors.dense(call.grad_out.data(), g.out_shape());
    auto to = sized<heed_gradients>();
    to.query = tensors.dense(query.data(), g.query_shape());
    to.key = tensors.dense(key.data(), g.key_shape());
    to.value = tensors.dense(value.data(), g.value_shape());
    if (!extra.empty()) to.extra = tensors.dense(extra.data(), extra_shape);
    to.bias = tensors.dense(by_bias.data(), bias_shape);
    to.parameters = learnt.gradients.data();
    to.parameter_count = learnt.gradients.size();
    // The saved numbers know their instruction set.
    REQUIRE(heed_use_instructions(nullptr) == heed_ok);
    REQUIRE(heed_backward(&c_call, saved, outputs.out, &from, &to) == heed_ok);
    check_near(out, call.out, "out");
    check_near(lse, call.lse, "lse");
    check_near(query, call.grad_query, "grad_query");
    check_near(key, call.grad_key, "grad_key");
    check_near(value, call.grad_value, "grad_value");
    check_near(extra, call.grad_extra, "grad_extra");
    check_near(by_bias, call.grad_bias, "grad_bias");
    std::size_t n = 0;
    for_each_param(call.grad_op, [&](const char* name, const Param<Real>& param) {
      const std::vector<Real> wanted(param.data(), param.data() + param.size());
      check_near(std::vector<Real>(learnt.numbers[n].begin(), learnt.numbers[n].end()), wanted,
                 name);
      ++n;
    });
    std::vector<Real> out_tangent(out.size());
    check_tangents<Real>(c_call, saved, outputs.out,
                         tensors.dense(out_tangent.data(), g.out_shape()), from.out, to);
    heed_saved_free(saved);
  });
}

}  // namespace

TEMPLATE_TEST_CASE("C calls of every variant are those of C++, on each instruction set", "[c]",
                   float, double) {
  for_each_variant<TestType>(kSizes, [](const auto& variant) {
    INFO(variant.name);
    check_variant(variant);
  });
}

TEST_CASE("C names the variants of the list", "[c]") {
  std::vector<std::string> names;
  while (const char* name = heed_variant_name(names.size())) names.emplace_back(name);
  CHECK(names == variant_names());
}

TEST_CASE("C describes every parameter of a variant once, and begins with the list's numbers",
          "[c]") {
  Tensors tensors;
  const VariantOptions options{.prototypes = 5, .seed = 9, .depth = 3};
  for_each_variant<float>(
      kSizes,
      [&](const auto& variant) {
        INFO(variant.name);
        const Geometry& g = variant.geometry;
        auto call = sized<heed_call>();
        call.variant = variant.name;
        call.query = tensors.dense<float>(nullptr, g.query_shape());
        call.value = tensors.dense<float>(nullptr, g.value_shape());
        auto start = sized<heed_start>();
        start.seed = 9;
        start.depth = 3;
        start.prototypes = 5;
        std::size_t count = 0;
        REQUIRE(heed_describe(&call, &start, nullptr, &count) == heed_ok);
        std::vector<heed_parameter_info> infos(count, sized<heed_parameter_info>());
        REQUIRE(heed_describe(&call, &start, infos.data(), &count) == heed_ok);
        std::set<std::string> names;
        for (const auto& info : infos) {
          names.insert(info.name);
          CHECK((info.kind == heed_choice) == (info.choices != nullptr));
          if (info.kind == heed_choice)
            CHECK(std::string(info.choices).find(info.text) != std::string::npos);
        }
        CHECK(names.size() == count);

        for_each_param(variant.op, [&](const char* name, const Param<float>& param) {
          INFO(name);
          const auto info = std::find_if(infos.begin(), infos.end(), [name](const auto& one) {
            return std::string(one.name) == name;
          });
          REQUIRE(info != infos.end());
          CHECK(std::vector<Index>(info->shape, info->shape + info->ndim) == param.shape());
          std::vector<float> numbers(std::size_t(param.size()));
          const heed_parameter to{
              name, tensors.of_axes(numbers.data(), {param.shape().begin(), param.shape().end()}),
              nullptr, 0};
          REQUIRE(heed_initial(&call, &start, &to, 1) == heed_ok);
          CHECK(std::equal(numbers.begin(), numbers.end(), param.data()));
        });
      },
      options);
}

TEST_CASE("choices of C are the enumerators", "[c]") {
  Tensors tensors;
  const auto choices = [&](const char* variant, const char* name) -> std::string {
    auto call = sized<heed_call>();
    call.variant = variant;
    call.query = call.value = tensors.dense<double>(nullptr, Shape{1, 2, 3, 4});
    std::vector<heed_parameter_info> infos(24, sized<heed_parameter_info>());
    std::size_t count = infos.size();
    REQUIRE(heed_describe(&call, nullptr, infos.data(), &count) == heed_ok);
    for (std::size_t n = 0; n < count; ++n)
      if (std::string(infos[n].name) == name) return infos[n].choices;
    return "none";
  };
  CHECK(choices("dar", "gate") == "logistic, centred, tanh, piecewise_linear");
  CHECK(choices("dar", "zero_norm") == "regularised, safe");
  CHECK(choices("differential", "pairing") ==
        "halves, halves_repeated_keys, halves_apart, heads, heads_apart");
  CHECK(choices("ode", "mode") == "steps, equilibrium, lagrange, lagrange_equilibrium");
  CHECK(choices("dialectical", "halting") == "per_token, batch, adaptive, outside");
  CHECK(choices("intent-from-q", "grain") == "elementwise, per_head");
}

TEST_CASE("options of C are those of C++", "[c]") {
  Tensors tensors;
  const Geometry g{1, 2, 2, 2, 19, 19, 6, 6};
  Dar<double> dar;
  dar.score.strength = {0.2, 0.7};
  dar.score.gate = GateKind::tanh;
  dar.score.iterations = 3;
  dar.score.adaptive = true;
  dar.score.eps = 1e-3;
  OpCall<Dar<double>> call(dar, g);
  call.options.scale = 0.3;
  call.options.dropout = {0.25, 11};
  call.forward();

  const double strength[] = {0.2, 0.7}, scale = 0.3;
  const heed_parameter given[] = {{"strength", tensors.of_axes(strength, {2}), nullptr, 0},
                                  {"gate", nullptr, "tanh", 0},
                                  {"iterations", nullptr, nullptr, 3},
                                  {"adaptive", nullptr, nullptr, 1},
                                  {"eps", nullptr, nullptr, 1e-3}};
  auto c_call = sized<heed_call>();
  c_call.variant = "dar";
  c_call.query = tensors.dense(call.query.data(), g.query_shape());
  c_call.key = tensors.dense(call.key.data(), g.key_shape());
  c_call.value = tensors.dense(call.value.data(), g.value_shape());
  c_call.parameters = given;
  c_call.parameter_count = std::size(given);
  c_call.scale = &scale;
  c_call.dropout = 0.25;
  c_call.dropout_seed = 11;
  std::vector<double> out(call.out.size());
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(out.data(), g.out_shape());
  on_each_set([&] {
    REQUIRE(heed_forward(&c_call, &outputs, nullptr) == heed_ok);
    check_near(out, call.out, "out");
  });
}

TEST_CASE("lists and empty tensors reach the prototypes", "[c]") {
  Tensors tensors;
  const Geometry g{1, 2, 2, 2, 9, 9, 4, 4};
  auto op = make_prototype<float>(g, 3);
  for (Index i = 0; i < op.score.W.size(); ++i) op.score.W[i] = float(std::sin(double(i)));
  op.score.counts = {1, 3};
  OpCall<Prototype<float>> call(op, g);
  call.forward();
  const std::int64_t counts[] = {1, 3};
  DLTensor list = *tensors.of_axes<double>(nullptr, {2});
  list.data = const_cast<std::int64_t*>(counts);
  list.dtype = {kDLInt, 64, 1};
  heed_parameter given[] = {{"W", tensors.of_axes(op.score.W.data(), {2, 3, 4}), nullptr, 0},
                            {"counts", &list, nullptr, 0}};
  auto c_call = sized<heed_call>();
  c_call.variant = "prototype";
  c_call.query = tensors.dense(call.query.data(), g.query_shape());
  c_call.key = tensors.dense(call.key.data(), g.key_shape());
  c_call.value = tensors.dense(call.value.data(), g.value_shape());
  c_call.parameters = given;
  c_call.parameter_count = 2;
  std::vector<float> out(call.out.size());
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(out.data(), g.out_shape());
  REQUIRE(heed_forward(&c_call, &outputs, nullptr) == heed_ok);
  check_near(out, call.out, "out");

  // Without prototypes: plain attention.
  given[0].tensor = tensors.of_axes<float>(nullptr, {2, 0, 4});
  c_call.parameter_count = 1;
  REQUIRE(heed_forward(&c_call, &outputs, nullptr) == heed_ok);
  OpCall<ScaledDot<float>> plain({}, g);
  plain.forward();
  check_near(out, plain.out, "out");
}

TEST_CASE("rows that halt by learnt probabilities give steps to C", "[c]") {
  Tensors tensors;
  const Geometry g{1, 2, 2, 2, 7, 7, 4, 4};
  auto op =
      heed_test::moving_dialectical<double>(g, {.max_steps = 5, .halting = Halting::adaptive});
  OpCall<Dialectical<double>> call(op, g);
  call.steps.resize(std::size_t(element_count(call.steps_shape(), "steps")));
  call.grad_steps.assign(call.steps.size(), 0.01);
  call.forward();
  call.backward();

  LearntParameters<double> learnt(op, tensors);
  learnt.given.push_back({"halting", nullptr, "adaptive", 0});
  learnt.given.push_back({"max_steps", nullptr, nullptr, 5});
  auto c_call = sized<heed_call>();
  c_call.variant = "dialectical";
  c_call.query = tensors.dense(call.query.data(), g.query_shape());
  c_call.key = tensors.dense(call.key.data(), g.key_shape());
  c_call.value = tensors.dense(call.value.data(), g.value_shape());
  c_call.parameters = learnt.given.data();
  c_call.parameter_count = learnt.given.size();
  std::vector<double> out(call.out.size()), steps(call.steps.size()), query(call.query.size());
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(out.data(), g.out_shape());
  outputs.steps = tensors.dense(steps.data(), call.steps_shape());
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&c_call, &outputs, &saved) == heed_ok);
  check_near(out, call.out, "out");
  check_near(steps, call.steps, "steps");
  auto from = sized<heed_outputs>();
  from.out = tensors.dense(call.grad_out.data(), g.out_shape());
  from.steps = tensors.dense(call.grad_steps.data(), call.steps_shape());
  auto to = sized<heed_gradients>();
  to.query = tensors.dense(query.data(), g.query_shape());
  CHECK(heed_backward(&c_call, saved, outputs.out, &from, &to) == heed_ok);
  check_near(query, call.grad_query, "grad_query");
  heed_saved_free(saved);
}

TEST_CASE("gradients of parameters may be of any floats, and stand apart from tangents", "[c]") {
  Tensors tensors;
  const std::vector<float> x{0.5F, -1, 2, 0.25F, 1, -0.5F}, grad_out{1, -2, 3, 0.5F, 1, 2};
  std::vector<float> out(6);
  const float strength = 0.5F;
  float wanted = 0;
  bfloat16 rounded{};
  const heed_parameter given{"strength", tensors.of_axes(&strength, {}), nullptr, 0};
  auto call = sized<heed_call>();
  call.variant = "dar";
  call.query = call.key = call.value = tensors.of_axes(x.data(), {3, 2});
  call.parameters = &given;
  call.parameter_count = 1;
  auto outputs = sized<heed_outputs>(), from = outputs;
  outputs.out = tensors.of_axes(out.data(), {3, 2});
  from.out = tensors.of_axes(grad_out.data(), {3, 2});
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&call, &outputs, &saved) == heed_ok);
  const auto into = [&](const DLTensor* tensor) {
    const heed_parameter gradient{"strength", tensor, nullptr, 0};
    auto to = sized<heed_gradients>();
    to.parameters = &gradient;
    to.parameter_count = 1;
    INFO(heed_last_error());
    REQUIRE(heed_backward(&call, saved, outputs.out, &from, &to) == heed_ok);
  };
  into(tensors.of_axes(&wanted, {1}));
  DLTensor narrow = *tensors.of_axes(&wanted, {});
  narrow.data = &rounded;
  narrow.dtype = {kDLBfloat, 16, 1};
  into(&narrow);
  CHECK(wanted != 0);
  CHECK(float(rounded) == float(bfloat16(wanted)));

  std::vector<float> moving(6, 1.0F);
  const auto refused = [&](const heed_parameter& direction, float* gradient) {
    const heed_parameter target{"strength", tensors.of_axes(gradient, {1}), nullptr, 0};
    auto along = sized<heed_tangents>();
    along.query = tensors.of_axes(moving.data(), {3, 2});
    along.parameters = &direction;
    along.parameter_count = 1;
    auto to = sized<heed_gradients>();
    to.parameters = &target;
    to.parameter_count = 1;
    const int status = heed_hvp(&call, saved, outputs.out, from.out, &along, nullptr, &to);
    return std::string(status == heed_invalid ? heed_last_error() : "no");
  };
  const heed_parameter one{"strength", tensors.of_axes(&strength, {1}), nullptr, 0},
      other{"strength", tensors.of_axes(&wanted, {1}), nullptr, 0};
  float room = 0;
  CHECK(refused(one, &room) == "no");
  CHECK(refused({"iterations", nullptr, nullptr, 1}, &room) ==
        "heed::hvp(dar): iterations is not learnt, it has no tangent");
  CHECK(refused(other, &wanted) ==
        "heed::hvp(dar): the gradient of strength overlaps the tangent of strength");
  CHECK(refused(one, &moving[1]) ==
        "heed::hvp(dar): the gradient of strength overlaps the tangent of query");
  heed_saved_free(saved);
}

TEST_CASE("C refuses in the sentences of C++", "[c]") {
  Tensors tensors;
  const Shape fits{1, 2, 3, 4};
  const std::vector<float> x(200, 0.5F);
  std::vector<float> y(200);
  const auto compare = [&](const Shape& query, const Shape& key, const Shape& value,
                           const Shape& out, const Shape& bias) {
    const auto view = [&](const Shape& s) { return TensorView<const float>(x.data(), s); };
    const std::string wanted = message_of([&] {
      Options options;
      options.name = "sdpa";
      heed::forward(ScaledDot<float>{}, {view(query), view(key), view(value)},
                    heed::bias<float>(view(bias)), TensorView<float>(y.data(), out), nullptr,
                    options);
    });
    auto mask = sized<heed_mask>();
    mask.bias = tensors.dense(x.data(), bias);
    auto call = sized<heed_call>();
    call.variant = "sdpa";
    call.query = tensors.dense(x.data(), query);
    call.key = tensors.dense(x.data(), key);
    call.value = tensors.dense(x.data(), value);
    call.mask = &mask;
    auto outputs = sized<heed_outputs>();
    outputs.out = tensors.dense(y.data(), out);
    CHECK(heed_forward(&call, &outputs, nullptr) == heed_invalid);
    CHECK(heed_last_error() == wanted);
    CHECK(wanted.find("heed::forward(sdpa): ") == 0);
    // A call is refused without its outputs, too.
    const int status = heed_check(&call);
    CHECK((wanted.find(": out has") != std::string::npos || status == heed_invalid));
    if (status != heed_ok) CHECK(heed_last_error() == wanted);
  };
  const Shape bias{1, 1, 1, 3};
  compare({1, 2, 3, 5}, fits, fits, fits, bias);
  compare({2, 2, 3, 4}, fits, fits, fits, bias);
  compare({1, 3, 3, 4}, fits, fits, {1, 3, 3, 4}, bias);
  compare(fits, fits, {1, 2, 4, 4}, fits, bias);
  compare(fits, fits, {1, 1, 3, 4}, fits, bias);
  compare(fits, fits, {1, 2, 3, 0}, fits, bias);
  compare(fits, fits, fits, {1, 2, 4, 4}, bias);
  compare(fits, fits, fits, fits, {1, 3, 1, 3});
}
