// SPDX-License-Identifier: Apache-2.0
// libheed compared with the calls of C++: the same numbers, the same sentences, the same list of
// variants, with every instruction set that the library and this processor have.

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

// DLTensors whose addresses do not change.
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

// Compares relative to the largest number: other instruction sets add in another order, and
// gradients of parameters are sums over all pairs.
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

// The sum of the products of two dense tensors' numbers; 0 if one is missing.
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

// `to` holds the gradients of heed_backward(). Each input moves along itself. That heed_jvp() is the transpose of
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

// Sizes that suit every variant of the list.
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

  // The same list in narrower numbers, from its end to its begin, and in numbers that no list is of.
  std::int32_t narrow[] = {3, 1};
  const std::int64_t backwards = -1;
  list.data = narrow + 1;
  list.strides = const_cast<std::int64_t*>(&backwards);
  list.dtype = {kDLInt, 32, 1};
  out.assign(out.size(), 0);
  REQUIRE(heed_forward(&c_call, &outputs, nullptr) == heed_ok);
  check_near(out, call.out, "out");
  list.dtype = {kDLInt, 16, 1};
  CHECK(heed_forward(&c_call, &outputs, nullptr) == heed_invalid);
  CHECK(std::string(heed_last_error()).find("has dtype int16, it must be int64 or int32") !=
        std::string::npos);

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
    // A call is also refused without its outputs.
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

// Each list has one entry, which lies at the end of its memory: sanitizers notice a read behind it.
TEST_CASE("a list of C that is longer than its call can have is not read", "[c]") {
  Tensors tensors;
  const std::vector<float> x(24, 0.5F);
  std::vector<float> y(24);
  const heed_window window{-1, 0, 0, heed_top_left};
  const heed_key_range range{0, 3};
  const std::int64_t number = 0;
  const double slope = 0.5;
  const heed_parameter strength{"strength", nullptr, nullptr, 0.5},
      to_y{"strength", tensors.of_axes(y.data(), {1}), nullptr, 0};
  auto mask = sized<heed_mask>();
  auto call = sized<heed_call>();
  call.variant = "dar";
  call.query = call.key = call.value = tensors.dense(x.data(), {1, 2, 3, 4});
  call.mask = &mask;
  auto outputs = sized<heed_outputs>(), from = sized<heed_outputs>();
  outputs.out = tensors.dense(y.data(), {1, 2, 3, 4});
  from.out = call.query;
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&call, &outputs, &saved) == heed_ok);
  auto to = sized<heed_gradients>();
  to.parameters = &to_y;
  heed_parameter_info info = sized<heed_parameter_info>();

  const auto check = [](int status, const std::string& text) {
    CHECK(status == heed_invalid);
    CHECK(heed_last_error() == text);
  };
  for (const std::size_t count : {std::size_t{4097}, std::size_t{1} << 60, ~std::size_t{0}}) {
    const std::string has = " has " + std::to_string(count) + " entries, ",
                      few = "it must have at most 4096";
    const auto refused = [&](auto heed_mask::*list, const auto* entries,
                             std::size_t heed_mask::*length, const std::string& name,
                             const std::string& limit) {
      mask = sized<heed_mask>();
      mask.*list = entries;
      mask.*length = count;
      check(heed_forward(&call, &outputs, nullptr), "heed::forward(dar): " + name + has + limit);
    };
    using M = heed_mask;
    const std::string tokens = "there are 3 (batch x length)";
    refused(&M::windows, &window, &M::window_count, "windows", few);
    refused(&M::key_ranges, &range, &M::key_range_count, "key_ranges", few);
    refused(&M::key_lengths, &number, &M::key_length_count, "key_lengths", "the batch is 1");
    refused(&M::query_documents, &number, &M::query_document_count, "query_documents", tokens);
    refused(&M::key_documents, &number, &M::key_document_count, "key_documents", tokens);
    refused(&M::alibi, &slope, &M::alibi_count, "alibi", "there are 2 heads");
    mask = sized<heed_mask>();

    to.parameter_count = count;
    check(heed_backward(&call, saved, outputs.out, &from, &to),
          "heed::backward(dar): the list of gradients" + has + few);
    check(heed_initial(&call, nullptr, &to_y, count),
          "heed_initial(dar): the list of initial values" + has + few);
    std::size_t room = count;
    check(heed_describe(&call, nullptr, &info, &room), "heed_describe: infos" + has + few);
    call.parameters = &strength;
    call.parameter_count = count;
    check(heed_forward(&call, &outputs, nullptr), "heed::forward(dar): parameters" + has + few);
    call.parameters = nullptr;
    call.parameter_count = 0;
  }
  heed_saved_free(saved);
}

namespace {

// Rows [first, first + count) of (1, heads, total, dim) memory.
template <class Real>
[[nodiscard]] std::vector<Real> rows_of(const std::vector<Real>& all, Index heads, Index first,
                                        Index count) {
  const Index row = Index(all.size()) / heads;
  std::vector<Real> rows;
  for (Index h = 0; h < heads; ++h)
    rows.insert(rows.end(), all.begin() + h * row + first, all.begin() + h * row + first + count);
  return rows;
}
[[nodiscard]] std::vector<double> waves(Index count, double step) {
  std::vector<double> numbers(std::size_t(count), 0.0);
  for (std::size_t n = 0; n < numbers.size(); ++n) numbers[n] = std::sin(step * double(n + 1));
  return numbers;
}

}  // namespace

TEST_CASE("each packed sequence of C has the bits of a call of its own", "[c]") {
  constexpr Index heads = 4, kv_heads = 2, dim = 6, sequences = 3;
  const std::int64_t query_starts[] = {0, 5, 5, 12}, key_starts[] = {0, 7, 10, 19};
  const std::int64_t lengths[] = {6, 3, 9}, firsts[] = {0, 3, 1};
  const double slopes[] = {0.5, 0.25, 0.125, 1};
  const std::vector<double> query = waves(heads * 12 * dim, 0.7),
                            key = waves(kv_heads * 19 * dim, 0.3),
                            value = waves(kv_heads * 19 * dim, 1.1),
                            loss = waves(heads * 12 * dim, 0.9), strength = {0.2};
  struct Results {
    std::vector<double> out, lse, query, key, value, strength = {0};
  };
  // Runs the sequences [first, first + 1), or all of them.
  const auto run = [&](Index first, bool all) {
    Tensors tensors;
    const auto last = std::size_t(all ? sequences : first + 1), from = std::size_t(first);
    const Index q = query_starts[from], rows = query_starts[last] - q, k = key_starts[from],
                keys = key_starts[last] - k;
    const auto of = [&](const std::vector<double>& whole, Index of_heads, Index at, Index count) {
      return rows_of(whole, of_heads, at * dim, count * dim);
    };
    const std::vector<double> own_query = of(query, heads, q, rows),
                              own_loss = of(loss, heads, q, rows),
                              own_key = of(key, kv_heads, k, keys),
                              own_value = of(value, kv_heads, k, keys);
    Results to{std::vector<double>(own_query.size()),
               std::vector<double>(std::size_t(heads * rows)), own_query, own_key, own_value};
    const Shape of_query{1, heads, rows, dim}, of_key{1, kv_heads, keys, dim};
    auto packed = sized<heed_packed>();
    packed.queries = query_starts;
    packed.query_count = packed.key_count = sequences + 1;
    packed.keys = key_starts;
    packed.first_query = firsts;
    packed.first_query_count = sequences;
    auto mask = sized<heed_mask>();
    mask.causal = 1;
    mask.causal_align = heed_bottom_right;
    mask.key_lengths = lengths + from;
    mask.key_length_count = last - from;
    mask.alibi = slopes;
    mask.alibi_count = heads;
    auto call = sized<heed_call>();
    call.variant = "dar";
    call.query = tensors.dense(own_query.data(), of_query);
    call.key = tensors.dense(own_key.data(), of_key);
    call.value = tensors.dense(own_value.data(), of_key);
    call.mask = &mask;
    const heed_parameter given{"strength", tensors.of_axes(strength.data(), {1}), nullptr, 0},
        gradient{"strength", tensors.of_axes(to.strength.data(), {1}), nullptr, 0};
    call.parameters = &given;
    call.parameter_count = 1;
    call.first_query = firsts[from];
    if (all) call.packed = &packed;
    auto outputs = sized<heed_outputs>(), grads = sized<heed_outputs>();
    outputs.out = tensors.dense(to.out.data(), of_query);
    outputs.lse = tensors.dense(to.lse.data(), {1, heads, rows, 1});
    grads.out = tensors.dense(own_loss.data(), of_query);
    auto gradients = sized<heed_gradients>();
    gradients.query = tensors.dense(to.query.data(), of_query);
    gradients.key = tensors.dense(to.key.data(), of_key);
    gradients.value = tensors.dense(to.value.data(), of_key);
    gradients.parameters = &gradient;
    gradients.parameter_count = 1;
    heed_saved* saved = nullptr;
    const int forward = heed_forward(&call, &outputs, &saved);
    INFO(heed_last_error());
    REQUIRE(forward == heed_ok);
    CHECK(heed_check(&call) == heed_ok);
    const int backward = heed_backward(&call, saved, outputs.out, &grads, &gradients);
    heed_saved_free(saved);
    INFO(heed_last_error());
    REQUIRE(backward == heed_ok);
    return to;
  };
  on_each_set([&] {
    const Results whole = run(0, true);
    double strengths = 0;
    for (Index n = 0; n < sequences; ++n) {
      INFO("sequence " << n);
      const Results own = run(n, false);
      const auto s = std::size_t(n);
      const Index q = query_starts[s], rows = query_starts[s + 1] - q, k = key_starts[s] * dim,
                  keys = key_starts[s + 1] * dim - k;
      CHECK(own.out == rows_of(whole.out, heads, q * dim, rows * dim));
      CHECK(own.lse == rows_of(whole.lse, heads, q, rows));
      CHECK(own.query == rows_of(whole.query, heads, q * dim, rows * dim));
      CHECK(own.key == rows_of(whole.key, kv_heads, k, keys));
      CHECK(own.value == rows_of(whole.value, kv_heads, k, keys));
      strengths += own.strength[0];
    }
    CHECK(std::abs(whole.strength[0] - strengths) < 1e-14);
    CHECK(strengths != 0);
  });
}

namespace {

// A cache of C, and tokens [first, last) of keys and values (1, 2, 9, 6) for it.
class CacheOfC {
 public:
  explicit CacheOfC(DLDataType dtype) {
    auto sizes = sized<heed_cache_sizes>();
    sizes.batch = 1, sizes.kv_heads = 2, sizes.dim_qk = sizes.dim_v = 6;
    sizes.dtype = dtype;
    REQUIRE(heed_cache_new(&sizes, &cache_) == heed_ok);
  }
  CacheOfC(const CacheOfC&) = delete;
  ~CacheOfC() { heed_cache_free(cache_); }
  [[nodiscard]] heed_cache* get() const { return cache_; }
  template <class Real>
  void append(const std::vector<Real>& key, const std::vector<Real>& value, Index first,
              Index last) {
    Tensors tensors;
    const auto keys = rows_of(key, 2, first * 6, (last - first) * 6),
               values = rows_of(value, 2, first * 6, (last - first) * 6);
    const Shape shape{1, 2, last - first, 6};
    REQUIRE(heed_cache_append(cache_, tensors.dense(keys.data(), shape),
                              tensors.dense(values.data(), shape)) == heed_ok);
  }

 private:
  heed_cache* cache_ = nullptr;
};

template <class Real>
void check_cache(DLDataType dtype, double tolerance) {
  Tensors tensors;
  const auto numbers = [](Index count, double step) {
    const std::vector<double> wide = waves(count, step);
    return std::vector<Real>(wide.begin(), wide.end());
  };
  const std::vector<Real> query = numbers(4 * 9 * 6, 0.7), key = numbers(2 * 9 * 6, 0.3),
                          value = numbers(2 * 9 * 6, 1.1);
  std::vector<Real> whole(query.size()), last(4 * 2 * 6);
  auto mask = sized<heed_mask>();
  mask.causal = 1;
  mask.causal_align = heed_bottom_right;
  auto call = sized<heed_call>(), decoding = call;
  call.variant = decoding.variant = "dar";
  call.mask = decoding.mask = &mask;
  call.query = tensors.dense(query.data(), {1, 4, 9, 6});
  call.key = tensors.dense(key.data(), {1, 2, 9, 6});
  call.value = tensors.dense(value.data(), {1, 2, 9, 6});
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(whole.data(), {1, 4, 9, 6});
  on_each_set([&] {
    REQUIRE(heed_forward(&call, &outputs, nullptr) == heed_ok);
    CacheOfC cache(dtype);
    decoding.cache = cache.get();
    Index first = 0;
    for (const Index end : {5, 7, 9}) {  // the last two tokens of each
      cache.append(key, value, first, end);
      CHECK(heed_cache_length(cache.get()) == end);
      first = end;
      const std::vector<Real> rows = rows_of(query, 4, (end - 2) * 6, 2 * 6);
      decoding.query = tensors.dense(rows.data(), {1, 4, 2, 6});
      auto shapes = sized<heed_shapes>();
      REQUIRE(heed_shapes_of(&decoding, &shapes) == heed_ok);
      CHECK((shapes.out[2] == 2 && shapes.out[3] == 6));
      auto to = sized<heed_outputs>();
      to.out = tensors.dense(last.data(), {1, 4, 2, 6});
      const int status = heed_forward(&decoding, &to, nullptr);
      INFO(heed_last_error());
      REQUIRE(status == heed_ok);
      // Calls compute with the instruction set of their cache.
      const std::string set = heed_instructions();
      const std::vector<Real> by_set = last;
      REQUIRE(heed_use_instructions(nullptr) == heed_ok);
      REQUIRE(heed_forward(&decoding, &to, nullptr) == heed_ok);
      REQUIRE(heed_use_instructions(set.c_str()) == heed_ok);
      CHECK(last == by_set);
      const std::vector<Real> wanted = rows_of(whole, 4, (end - 2) * 6, 2 * 6);
      double worst = 0;
      for (std::size_t n = 0; n < wanted.size(); ++n)
        worst = std::max(worst, std::abs(double(last[n]) - double(wanted[n])));
      INFO("off by " << worst);
      CHECK(worst <= tolerance);
    }
  });
}

}  // namespace

TEST_CASE("a cache of C decodes as the whole call computes, in each type", "[c]") {
  check_cache<double>({kDLFloat, 64, 1}, 1e-13);
  check_cache<float>({0, 0, 0}, 1e-5);
  check_cache<float>({kDLFloat, 32, 1}, 1e-5);
  check_cache<float>({kDLFloat, 16, 1}, 1e-3);
  check_cache<float>({kDLBfloat, 16, 1}, 1e-2);
  check_cache<float>({kDLInt, 8, 1}, 2e-2);
}

TEST_CASE("packed sequences of C with caches have the bits of calls with one cache each", "[c]") {
  Tensors tensors;
  const std::vector<double> query = waves(4 * 3 * 6, 0.7), key = waves(2 * 9 * 6, 0.3),
                            value = waves(2 * 9 * 6, 1.1);
  CacheOfC one({kDLFloat, 64, 1}), two({kDLFloat, 64, 1});
  one.append(key, value, 0, 4);
  two.append(key, value, 3, 9);
  heed_cache* const both[] = {one.get(), two.get()};
  const std::int64_t starts[] = {0, 1, 3};
  auto packed = sized<heed_packed>();
  packed.queries = starts;
  packed.query_count = 3;
  packed.caches = both;
  packed.cache_count = 2;
  auto mask = sized<heed_mask>();
  mask.causal = 1;
  mask.causal_align = heed_bottom_right;
  auto call = sized<heed_call>();
  call.variant = "dar";
  call.mask = &mask;
  call.query = tensors.dense(query.data(), {1, 4, 3, 6});
  call.packed = &packed;
  std::vector<double> out(query.size());
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(out.data(), {1, 4, 3, 6});
  const int status = heed_forward(&call, &outputs, nullptr);
  INFO(heed_last_error());
  REQUIRE(status == heed_ok);
  call.packed = nullptr;
  for (std::size_t n = 0; n < 2; ++n) {
    const Index count = starts[n + 1] - starts[n];
    const std::vector<double> rows = rows_of(query, 4, starts[n] * 6, count * 6);
    std::vector<double> own(rows.size());
    call.query = tensors.dense(rows.data(), {1, 4, count, 6});
    call.cache = both[n];
    outputs.out = tensors.dense(own.data(), {1, 4, count, 6});
    REQUIRE(heed_forward(&call, &outputs, nullptr) == heed_ok);
    CHECK(own == rows_of(out, 4, starts[n] * 6, count * 6));
  }
}

TEST_CASE("caches and packed sequences of C that do not fit are refused in a sentence", "[c]") {
  Tensors tensors;
  const std::vector<double> x = waves(4 * 9 * 6, 0.3);
  const std::vector<float> narrow(2 * 2 * 6);
  std::vector<double> y(x.size());
  const CacheOfC cache({kDLFloat, 64, 1});
  const auto check = [](int status, const std::string& text) {
    CHECK(status == heed_invalid);
    CHECK(heed_last_error() == text);
  };
  const DLTensor* const two = tensors.dense(x.data(), {1, 2, 2, 6});
  check(heed_cache_append(nullptr, two, two),
        "heed_cache_append: cache is a null pointer, it must come from heed_cache_new()");
  check(heed_cache_append(cache.get(), two, nullptr), "heed_cache_append: value is a null pointer");
  check(heed_cache_append(cache.get(), tensors.dense(narrow.data(), {1, 2, 2, 6}), two),
        "heed_cache_append: key has dtype float32, for this cache it must be float64");
  check(heed_cache_append(cache.get(), two, tensors.dense(x.data(), {1, 2, 1, 6})),
        "heed_cache_append: value has len 1, key has 2");
  REQUIRE(heed_cache_append(cache.get(), two, two) == heed_ok);
  check(heed_cache_truncate(cache.get(), 3),
        "heed_cache_truncate: len is 3, the cache holds 2 tokens");
  check(heed_cache_reserve(cache.get(), -1),
        "heed_cache_reserve: len is -1, it must not be negative");
  CHECK(heed_cache_reserve(cache.get(), 300) == heed_ok);
  CHECK((heed_cache_capacity(cache.get()) == 512 && heed_cache_length(cache.get()) == 2));
  heed_cache* none = cache.get();
  auto sizes = sized<heed_cache_sizes>();
  sizes.dtype = {kDLComplex, 64, 1};
  check(heed_cache_new(&sizes, &none),
        "heed_cache_new: dtype is complex64, it must be float64, float32, float16, bfloat16 or "
        "int8");
  CHECK(none == nullptr);
  sizes.dtype = {};
  sizes.page_rows = 7;
  CHECK(heed_cache_new(&sizes, &none) == heed_invalid);
  CHECK(std::string(heed_last_error()).find("heed_cache_new: page_rows is 7, it must be a ") == 0);

  auto call = sized<heed_call>();
  call.variant = "dar";
  call.query = tensors.dense(x.data(), {1, 2, 3, 6});
  call.cache = cache.get();
  auto outputs = sized<heed_outputs>();
  outputs.out = tensors.dense(y.data(), {1, 2, 3, 6});
  const auto refused = [&](const std::string& text) {
    check(heed_forward(&call, &outputs, nullptr), text);
    check(heed_check(&call), text);
  };
  refused(
      "heed::forward(dar): query has len 3, the cache holds 2 tokens; queries are its last "
      "tokens, whose keys are appended first");
  call.query = two;
  outputs.out = tensors.dense(y.data(), {1, 2, 2, 6});
  call.key = two;
  refused("heed::forward(dar): key was given beside a cache, which holds it");
  call.key = nullptr;
  call.first_query = 1;
  refused("heed::forward(dar): first_query is 1 beside a cache, whose last tokens the queries are");
  call.first_query = 0;
  call.query = tensors.dense(narrow.data(), {1, 2, 2, 6});
  refused("heed::forward(dar): query has floats, the cache is one of doubles");
  call.query = tensors.dense(x.data(), {1, 2, 1, 6});
  outputs.out = tensors.dense(y.data(), {1, 2, 1, 6});
  auto mask = sized<heed_mask>();
  mask.causal = 1;
  call.mask = &mask;
  refused(
      "heed::forward(dar): the queries are the last tokens of the keys, len_q is 1 and len_kv is "
      "2; the mask's bands place them at the first keys, Align::bottom_right at the last ones");
  call.mask = nullptr;
  call.query = two;
  outputs.out = tensors.dense(y.data(), {1, 2, 2, 6});
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&call, &outputs, &saved) == heed_ok);
  auto to = sized<heed_gradients>();
  auto grads = sized<heed_outputs>();
  grads.out = two;
  check(heed_backward(&call, saved, outputs.out, &grads, &to),
        "heed::backward: the call has a cache, heed_forward() alone takes one; give keys and "
        "values as tensors");
  heed_saved_free(saved);
  // Features that dar has kept are of no use to other variants.
  const std::vector<double> columns = {1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0};
  const heed_parameter projected{"projection", tensors.of_axes(columns.data(), {6, 2}), nullptr, 0};
  call.parameters = &projected;
  call.parameter_count = 1;
  CHECK(heed_forward(&call, &outputs, nullptr) == heed_invalid);
  heed_cache_forget(cache.get());
  const int status = heed_forward(&call, &outputs, nullptr);
  INFO(heed_last_error());
  CHECK(status == heed_ok);
  call.parameters = nullptr;
  call.parameter_count = 0;

  const std::int64_t starts[] = {0, 1, 2}, falling[] = {0, 2, 1};
  auto packed = sized<heed_packed>();
  packed.queries = starts;
  packed.query_count = 3;
  call.packed = &packed;
  refused(
      "heed::forward(dar): a cache and packed sequences were given; give one cache per "
      "sequence (packed.caches)");
  call.cache = nullptr;
  call.key = call.value = two;
  packed.queries = falling;
  refused(
      "heed::forward(dar): packed.queries falls from 2 to 1 at sequence 1, no sequence has a "
      "negative length");
  packed.queries = nullptr;
  refused("heed::forward(dar): packed.queries is a null pointer");
  packed.queries = starts;
  packed.query_count = ~std::size_t{0};
  refused(
      "heed::forward(dar): packed.queries has 18446744073709551615 entries, it must have at most "
      "4098");
  packed.query_count = 3;
  const std::int64_t firsts[] = {0, -1};
  packed.first_query = firsts;
  packed.first_query_count = 2;
  refused(
      "heed::forward(dar) (sequence 1): first_query is -1, it must lie in [0, 9007199254740992]");
  packed.first_query = nullptr;
  packed.first_query_count = 0;
  packed.keys = starts;
  packed.key_count = 4;
  refused("heed::forward(dar): packed.keys has 4 entries, packed.queries has 3");
  packed.key_count = 3;
  heed_cache* const twice[] = {cache.get(), cache.get()};
  packed.caches = twice;
  packed.cache_count = 2;
  call.key = call.value = nullptr;
  packed.keys = nullptr;
  packed.key_count = 0;
  refused(
      "heed::forward(dar): packed.caches has one cache twice, each sequence needs one of its own");
}
