// SPDX-License-Identifier: Apache-2.0
#include <heed/check/gradcheck.hpp>

#include "catch.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace math = heed::math;
using heed::check_gradient;
using heed::check_gradient_on;
using heed::GradcheckOptions;
using heed::GradientReport;
using heed::Index;
using heed::Method;
using heed::NamedTensor;
using heed::tape_gradient;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr Method kMethods[] = {Method::central_difference, Method::complex_step, Method::dual};

// Causal single-head attention of tensors 0, 1, 2 (query, key, value: 4 tokens of width 3), each
// output gated by tensor 3 (width 3) and weighted with a different number.
struct Attention {
  static constexpr Index len = 4, dim = 3;

  template <class S>
  S operator()(const std::vector<std::vector<S>>& t) const {
    S loss = math::constant<S>(0);
    for (Index i = 0; i < len; ++i) {
      std::vector<S> weight;
      S sum = math::constant<S>(0);
      for (Index j = 0; j <= i; ++j) {
        const S dot = math::dot_product(dim, row(t[0], i), row(t[1], j));
        weight.push_back(math::exp(S(math::constant<S>(0.6) * dot)));
        sum += weight.back();
      }
      for (Index c = 0; c < dim; ++c) {
        const auto column = [&](Index j) { return t[2][std::size_t(j * dim + c)]; };
        const auto p = [&](Index j) { return weight[std::size_t(j)]; };
        const S out = math::dot_product(i + 1, p, column) / sum;
        loss +=
            math::constant<S>(double(i + 2 * c) - 2.5) * out * math::sigmoid(t[3][std::size_t(c)]);
      }
    }
    return loss;
  }

  template <class S>
  static auto row(const std::vector<S>& tensor, Index i) {
    return [&tensor, i](Index c) { return tensor[std::size_t(i * dim + c)]; };
  }
};

std::vector<NamedTensor> attention_inputs() {
  std::mt19937_64 random(20);
  std::normal_distribution<double> normal;
  std::vector<NamedTensor> inputs = {{"query", {}}, {"key", {}}, {"value", {}}, {"gate", {}}};
  for (NamedTensor& input : inputs) {
    input.values.resize(input.name == "gate" ? 3 : 12);
    for (double& x : input.values) x = normal(random);
  }
  return inputs;
}

// x^2 y + 3 y at x = 2, y = -1: gradients -4 and 7.
const auto kPolynomial = [](const auto& t) {
  return t[0][0] * t[0][0] * t[1][0] + t[1][0] + t[1][0] + t[1][0];
};
const std::vector<NamedTensor> kPoint = {{"x", {2}}, {"y", {-1}}};

GradcheckOptions only(Index max_entries_per_tensor) {
  GradcheckOptions options;
  options.max_entries_per_tensor = max_entries_per_tensor;
  return options;
}

void require_message(const std::vector<NamedTensor>& analytic, const std::string& part) {
  CAPTURE(part);
  for (const Method method : kMethods) {
    std::string message;
    try {
      (void)check_gradient(kPolynomial, kPoint, analytic, method);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CAPTURE(message);
    CHECK(message.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("a gradient worked out by hand passes, in any order of the names") {
  for (const Method method : kMethods) {
    const GradientReport report =
        check_gradient(kPolynomial, kPoint, {{"y", {7}}, {"x", {-4}}}, method);
    CAPTURE(report.text());
    CHECK(report.passed);
    CHECK(report.checked == 2);
    CHECK(report.failed == 0);
    CHECK(report.failures.empty());
    CHECK(report.worst_error <= (method == Method::central_difference ? 1e-9 : 1e-15));
    CHECK(report.text().find("passed: 2 entries") != std::string::npos);
  }
}

TEST_CASE("the tape's gradient of attention passes all three methods") {
  const auto inputs = attention_inputs();
  const auto gradients = tape_gradient(Attention(), inputs);
  REQUIRE(gradients.size() == 4);
  for (std::size_t t = 0; t < 4; ++t) {
    CHECK(gradients[t].name == inputs[t].name);
    for (std::size_t i = 0; i < gradients[t].values.size(); ++i)
      if (t != 0 || i >= 3)  // the first query sees one key: its gradient is 0
        CHECK(std::abs(gradients[t].values[i]) > 1e-4);
  }
  for (const Method method : kMethods) {
    const GradientReport report = check_gradient(Attention(), inputs, gradients, method);
    CAPTURE(report.text());
    CHECK(report.passed);
    CHECK(report.checked == 39);
    CHECK(report.worst_error == report.worst.error);
  }
}

TEST_CASE("one entry with its sign flipped is found and named") {
  const auto inputs = attention_inputs();
  const auto right = tape_gradient(Attention(), inputs);
  for (const Method method : kMethods)
    for (std::size_t t = 0; t < 4; ++t) {
      const Index index = inputs[t].name == "gate" ? 1 : 5;
      auto wrong = right;
      wrong[t].values[std::size_t(index)] *= -1;
      const GradientReport report = check_gradient(Attention(), inputs, wrong, method);
      CAPTURE(report.text());
      CHECK_FALSE(report.passed);
      REQUIRE(report.failed == 1);
      REQUIRE(report.failures.size() == 1);
      CHECK(report.failures[0].tensor == inputs[t].name);
      CHECK(report.failures[0].index == index);
      CHECK(report.failures[0].analytic == -right[t].values[std::size_t(index)]);
      CHECK(report.failures[0].numeric ==
            Approx(right[t].values[std::size_t(index)]).epsilon(1e-6));
      CHECK(report.worst.tensor == inputs[t].name);
      CHECK(report.worst.index == index);
      CHECK(report.text().find(inputs[t].name + "[" + std::to_string(index) + "]") !=
            std::string::npos);
      CHECK(report.text().find("FAILED: 1 of 39 entries") != std::string::npos);
    }
}

TEST_CASE("one entry off by 1e-6 is found and named") {
  const auto inputs = attention_inputs();
  for (const Method method : kMethods) {
    auto wrong = tape_gradient(Attention(), inputs);
    wrong[1].values[7] += 1e-6;
    const GradientReport report = check_gradient(Attention(), inputs, wrong, method);
    CAPTURE(report.text());
    REQUIRE(report.failures.size() == 1);
    CHECK(report.failures[0].tensor == "key");
    CHECK(report.failures[0].index == 7);
    CHECK(report.worst_error == Approx(1e-6).epsilon(0.1));
  }
}

TEST_CASE("the error is relative to the larger gradient, and absolute below 1") {
  const auto steep = [](const auto& t) { return t[0][0] * t[0][0] * t[0][0]; };
  const std::vector<NamedTensor> far = {{"x", {1000}}}, near = {{"x", {0.01}}};
  const auto passes = [&](const auto& at, double analytic, double tolerance) {
    GradcheckOptions options;
    options.tolerance = tolerance;
    return check_gradient(steep, at, {{"x", {analytic}}}, Method::dual, options).passed;
  };
  CHECK(passes(far, 3e6 + 2.9, 1e-6));
  CHECK_FALSE(passes(far, 3e6 + 3.1, 1e-6));
  CHECK(passes(near, 3e-4 + 0.9e-6, 1e-6));
  CHECK_FALSE(passes(near, 3e-4 + 1.1e-6, 1e-6));
}

TEST_CASE("NaN or infinity on either side is a failure, also when both sides agree on it") {
  const auto line = [](const auto& t) { return t[0][0] + t[0][0]; };
  const auto square = [](const auto& t) { return t[0][0] * t[0][0]; };
  const auto root = [](const auto& t) { return math::sqrt(t[0][0]); };
  for (const Method method : kMethods) {
    for (const double wrong : {kNan, kInf, -kInf}) {
      const auto report = check_gradient(line, {{"x", {1}}}, {{"x", {wrong}}}, method);
      CHECK_FALSE(report.passed);
      CHECK(report.failed == 1);
      CHECK(report.worst_error == kInf);
    }
    for (const double analytic : {kNan, 2.0}) {
      const auto report = check_gradient(square, {{"x", {kNan}}}, {{"x", {analytic}}}, method);
      CHECK_FALSE(report.passed);
      CHECK(std::isnan(report.worst.numeric));
    }
  }
  CHECK_FALSE(check_gradient(root, {{"x", {0}}}, {{"x", {kInf}}}, Method::dual).passed);
  CHECK_FALSE(check_gradient(root, {{"x", {-1}}}, {{"x", {kNan}}}, Method::dual).passed);
  CHECK_FALSE(check_gradient(root, {{"x", {-1}}}, {{"x", {0}}}, Method::dual).passed);
  const auto late = check_gradient(line, {{"x", {1, 1, 1}}}, {{"x", {3, kNan, 5}}}, Method::dual);
  CHECK(late.failed == 3);
  CHECK(late.worst.index == 1);
}

TEST_CASE("a gradient that is missing, unknown, doubled or of another length is refused by name") {
  require_message({{"x", {-4}}}, "analytic has no entry \"y\"");
  require_message({{"x", {-4}}, {"y", {7, 7}}}, "analytic \"y\" has 2 values, inputs has 1");
  require_message({{"x", {-4}}, {"y", {7}}, {"z", {1}}}, "names \"z\", which is not in inputs");
  require_message({{"x", {-4}}, {"y", {7}}, {"x", {-4}}}, "analytic holds \"x\" twice");
  const std::vector<NamedTensor> twice = {{"x", {2}}, {"x", {-1}}};
  CHECK_THROWS_AS(check_gradient(kPolynomial, twice, twice, Method::dual), std::invalid_argument);
}

TEST_CASE("options out of range are refused") {
  const auto refused = [](const GradcheckOptions& options) {
    CHECK_THROWS_AS(
        check_gradient(kPolynomial, kPoint, {{"x", {-4}}, {"y", {7}}}, Method::dual, options),
        std::invalid_argument);
  };
  GradcheckOptions options;
  options.tolerance = -1e-9;
  refused(options);
  options.tolerance = kNan;
  refused(options);
  options = {};
  options.step = 0.0;
  refused(options);
  options = {};
  options.max_entries_per_tensor = -1;
  refused(options);
  options = {};
  options.max_failures = -1;
  refused(options);
  CHECK_THROWS_AS(check_gradient(kPolynomial, kPoint, {{"x", {-4}}, {"y", {7}}}, Method(7)),
                  std::invalid_argument);
}

TEST_CASE("step and tolerance are obeyed") {
  const auto cube = [](const auto& t) { return t[0][0] * t[0][0] * t[0][0]; };
  GradcheckOptions options;
  options.step = 0.1;  // the central difference of x^3 is 3 x^2 + h^2, at x = 10 with h = 0.1 * 10
  const auto coarse =
      check_gradient(cube, {{"x", {10}}}, {{"x", {300}}}, Method::central_difference, options);
  CHECK_FALSE(coarse.passed);
  CHECK(coarse.worst.numeric == Approx(301).epsilon(1e-12));
  options.tolerance = 0.01;
  CHECK(check_gradient(cube, {{"x", {10}}}, {{"x", {300}}}, Method::central_difference, options)
            .passed);
}

TEST_CASE("a report keeps the first failures and counts all") {
  const auto sum_of_squares = [](const auto& t) {
    auto sum = t[0][0] * t[0][0];
    for (std::size_t i = 1; i < t[0].size(); ++i) sum += t[0][i] * t[0][i];
    return sum;
  };
  const std::vector<NamedTensor> at = {{"x", std::vector<double>(50, 1.0)}};
  const std::vector<NamedTensor> zero = {{"x", std::vector<double>(50, 0.0)}};
  const auto report = check_gradient(sum_of_squares, at, zero, Method::dual);
  CHECK(report.failed == 50);
  CHECK(report.failures.size() == 20);
  CHECK(report.failures[19].index == 19);
  CHECK(report.text().find("and 30 more") != std::string::npos);
  GradcheckOptions none;
  none.max_failures = 0;
  const auto brief = check_gradient(sum_of_squares, at, zero, Method::dual, none);
  CHECK_FALSE(brief.passed);
  CHECK(brief.failed == 50);
  CHECK(brief.failures.empty());
}

TEST_CASE("a limited check visits distinct entries that cover every part and every column") {
  const std::vector<Index> all = heed::detail::spread_entries(5, 0);
  CHECK(all == std::vector<Index>{0, 1, 2, 3, 4});
  CHECK(heed::detail::spread_entries(5, 7) == all);
  CHECK(heed::detail::spread_entries(0, 7).empty());
  for (const Index n : {100, 101, 4096})
    for (const Index limit : {1, 7, 64, 99}) {
      const std::vector<Index> some = heed::detail::spread_entries(n, limit);
      REQUIRE(Index(some.size()) == limit);
      for (std::size_t k = 0; k < some.size(); ++k) {
        CHECK(some[k] >= 0);
        CHECK(some[k] < n);
        if (k > 0) CHECK(some[k] > some[k - 1]);
        if (k > 0) CHECK(some[k] - some[k - 1] <= 2 * (n / limit + 1));
      }
    }
  std::set<Index> columns;  // one entry for each of 64 rows of 64: most columns are met
  for (const Index i : heed::detail::spread_entries(4096, 64)) columns.insert(i % 64);
  CHECK(columns.size() > 50);

  const auto inputs = attention_inputs();
  const auto gradients = tape_gradient(Attention(), inputs);
  const auto report = check_gradient(Attention(), inputs, gradients, Method::dual, only(5));
  CHECK(report.passed);
  CHECK(report.checked == 5 + 5 + 5 + 3);
}

TEST_CASE("a function of doubles only can be checked by central differences") {
  const auto hypotenuse = [](const std::vector<std::vector<double>>& t) {
    return std::hypot(t[0][0], t[0][1]);
  };
  const std::vector<NamedTensor> at = {{"x", {3, 4}}};
  CHECK(check_gradient_on<double>(hypotenuse, at, {{"x", {0.6, 0.8}}}).passed);
  CHECK_FALSE(check_gradient_on<double>(hypotenuse, at, {{"x", {0.6, -0.8}}}).passed);
}

TEST_CASE("empty tensors and constant functions have a gradient too") {
  const auto seven = [](const auto& t) {
    using S = typename std::remove_cvref_t<decltype(t[0])>::value_type;
    return math::constant<S>(7);
  };
  const std::vector<NamedTensor> at = {{"x", {1, 2}}, {"empty", {}}};
  const auto gradients = tape_gradient(seven, at);
  CHECK(gradients[0].values == std::vector<double>{0, 0});
  CHECK(gradients[1].values.empty());
  for (const Method method : kMethods) {
    CHECK(check_gradient(seven, at, gradients, method).checked == 2);
    CHECK(check_gradient(seven, {{"empty", {}}}, {{"empty", {}}}, method).checked == 0);
    CHECK_FALSE(check_gradient(seven, at, {{"x", {0, 1}}, {"empty", {}}}, method).passed);
  }
  CHECK(GradientReport().text().find("no entries") != std::string::npos);
}

TEST_CASE("inputs are restored after each entry, so that a later one sees the true point") {
  const auto product = [](const auto& t) { return t[0][0] * t[0][1] * t[0][2] * t[1][0]; };
  const std::vector<NamedTensor> at = {{"a", {3, 5, 7}}, {"b", {11}}};
  for (const Method method : kMethods)
    CHECK(check_gradient(product, at, {{"a", {385, 231, 165}}, {"b", {105}}}, method).passed);
}
