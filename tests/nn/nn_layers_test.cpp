// SPDX-License-Identifier: Apache-2.0
#include <heed/check/gradcheck.hpp>
#include <heed/nn/mlp.hpp>
#include <heed/nn/norm.hpp>
#include <heed/nn/rope.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

using heed::check_gradient_on;
using heed::CounterRandom;
using heed::Index;
using heed::NamedTensor;
using heed::Param;
using namespace heed::nn;

namespace {

constexpr std::uint64_t kSeed = 20250611;
const Activation kActivations[] = {Activation::gelu_erf, Activation::gelu_tanh, Activation::silu};

template <class T>
Matrix<T> random_matrix(Index rows, Index columns, std::uint64_t stream, double scale = 1) {
  Matrix<T> m(rows, columns);
  const CounterRandom random(kSeed, stream);
  for (Index i = 0; i < rows * columns; ++i)
    m.view().data[i] = T(scale * random.normal(std::uint64_t(i)));
  return m;
}

template <class T>
Matrix<T> filled(Index rows, Index columns, T value) {
  Matrix<T> m(rows, columns);
  m.fill(value);
  return m;
}

// The numbers of a view row by row, without the gaps between rows.
template <class T>
std::vector<std::remove_const_t<T>> numbers(const MatrixView<T>& m) {
  std::vector<std::remove_const_t<T>> all;
  for (Index r = 0; r < m.rows; ++r) all.insert(all.end(), m.row(r), m.row(r) + m.columns);
  return all;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

template <class A, class B>
double largest_difference(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(double(a[i]) - double(b[i])));
  return largest;
}

// Draws every weight of the layer again.
template <class T, class Layer>
void randomise(Layer& layer) {
  std::uint64_t stream = 100;
  layer.visit(Visitor<T>([&](const std::string&, Param<T>& value, Param<T>&) {
    const CounterRandom random(kSeed, stream++);
    for (Index i = 0; i < value.size(); ++i)
      value[i] = T(0.2 + 0.5 * random.normal(std::uint64_t(i)));
  }));
}

template <class T, class Layer>
std::vector<std::string> names(Layer& layer) {
  std::vector<std::string> all;
  layer.visit(
      Visitor<T>([&](const std::string& name, Param<T>&, Param<T>&) { all.push_back(name); }));
  return all;
}

template <class T, class Layer>
std::vector<T> gradients(Layer& layer) {
  std::vector<T> all;
  layer.visit(Visitor<T>([&](const std::string&, Param<T>&, Param<T>& grad) {
    all.insert(all.end(), grad.data(), grad.data() + grad.size());
  }));
  return all;
}

// Gradients of sum(y o g) by x and by all weights, against central differences.
template <class Layer>
void check_layer(Layer& layer, Index rows, Index in, Index out) {
  randomise<double>(layer);
  clear_gradients<double>(layer);
  Context<double> c;
  Matrix<double> x = random_matrix<double>(rows, in, 1), y(rows, out), dx(rows, in);
  const Matrix<double> g = random_matrix<double>(rows, out, 2);
  layer.forward(c, x.view(), y.view());
  layer.backward(c, x.view(), g.view(), dx.view());

  std::vector<NamedTensor> at = {{"x", numbers(x.view())}}, analytic = {{"x", numbers(dx.view())}};
  layer.visit(
      Visitor<double>([&](const std::string& name, Param<double>& value, Param<double>& grad) {
        at.push_back({name, {value.data(), value.data() + value.size()}});
        analytic.push_back({name, {grad.data(), grad.data() + grad.size()}});
      }));
  const auto loss = [&](const std::vector<std::vector<double>>& tensors) {
    std::size_t next = 1;
    layer.visit(Visitor<double>([&](const std::string&, Param<double>& value, Param<double>&) {
      std::copy(tensors[next].begin(), tensors[next].end(), value.data());
      ++next;
    }));
    layer.forward(c, {tensors[0].data(), rows, in}, y.view());
    double sum = 0;
    for (Index i = 0; i < rows * out; ++i) sum += y.view().data[i] * g.view().data[i];
    return sum;
  };
  const auto report = check_gradient_on<double>(loss, at, analytic);
  INFO(report.text());
  CHECK(report.passed);
  CHECK(report.checked == Index(at[0].values.size()) + count_weights<double>(layer));
}

struct Pass {
  std::vector<double> y, dx, weights;
};

// Forward and backward of a fresh layer in T, on the same rounded numbers for float and double.
template <class T, class Layer>
Pass run_layer(Layer layer, Index rows, Index in, Index out, int threads) {
  const auto rounded = [](Index r, Index k, std::uint64_t stream) {
    Matrix<float> source = random_matrix<float>(r, k, stream);
    Matrix<T> m(r, k);
    std::copy(source.view().data, source.view().data + r * k, m.view().data);
    return m;
  };
  std::uint64_t stream = 100;
  layer.visit(Visitor<T>([&](const std::string&, Param<T>& value, Param<T>&) {
    const CounterRandom random(kSeed, stream++);
    for (Index i = 0; i < value.size(); ++i)
      value[i] = T(float(0.2 + 0.3 * random.normal(std::uint64_t(i))));
  }));
  Context<T> c;
  c.threads = threads;
  const Matrix<T> x = rounded(rows, in, 1), g = rounded(rows, out, 2);
  Matrix<T> y(rows, out), dx(rows, in);
  layer.forward(c, x.view(), y.view());
  layer.backward(c, x.view(), g.view(), dx.view());
  const auto wide = [](const std::vector<T>& v) { return std::vector<double>(v.begin(), v.end()); };
  return {wide(numbers(y.view())), wide(numbers(dx.view())), wide(gradients<T>(layer))};
}

double largest(const std::vector<double>& v) {
  double top = 0;
  for (const double value : v) top = std::max(top, std::abs(value));
  return top;
}

// Compares float with double; make<T>() builds the layer. Tolerance: 64 roundings of the largest number.
template <class Make>
void check_float_and_threads(const Make& make, Index rows, Index in, Index out) {
  const Pass one = run_layer<float>(make(float()), rows, in, out, 1);
  const Pass three = run_layer<float>(make(float()), rows, in, out, 3);
  CHECK(same_bits(one.y, three.y));
  CHECK(same_bits(one.dx, three.dx));
  CHECK(same_bits(one.weights, three.weights));
  const Pass exact = run_layer<double>(make(double()), rows, in, out, 1);
  constexpr double eps = std::numeric_limits<float>::epsilon();
  CHECK(largest_difference(one.y, exact.y) <= 64 * eps * largest(exact.y));
  CHECK(largest_difference(one.dx, exact.dx) <= 64 * eps * largest(exact.dx));
  CHECK(largest_difference(one.weights, exact.weights) <= 64 * eps * largest(exact.weights));
}

// A second call with Into::add doubles dx and the weights' gradients.
template <class Layer>
void check_adding(Layer& layer, Index rows, Index in, Index out) {
  randomise<double>(layer);
  clear_gradients<double>(layer);
  Context<double> c;
  const Matrix<double> x = random_matrix<double>(rows, in, 1);
  const Matrix<double> g = random_matrix<double>(rows, out, 2);
  Matrix<double> y(rows, out), dx = filled(rows, in, 1e3);
  layer.forward(c, x.view(), y.view());
  layer.backward(c, x.view(), g.view(), dx.view());
  const auto first_dx = numbers(dx.view()), first = gradients<double>(layer);
  layer.backward(c, x.view(), g.view(), dx.view(), Into::add);
  const auto second_dx = numbers(dx.view()), second = gradients<double>(layer);
  for (std::size_t i = 0; i < first_dx.size(); ++i)
    CHECK(second_dx[i] == Approx(2 * first_dx[i]).epsilon(1e-12).margin(1e-12));
  for (std::size_t i = 0; i < first.size(); ++i)
    CHECK(second[i] == Approx(2 * first[i]).epsilon(1e-12).margin(1e-12));
  layer.backward(c, x.view(), g.view(), {});
  const auto third = gradients<double>(layer);
  for (std::size_t i = 0; i < first.size(); ++i)
    CHECK(third[i] == Approx(3 * first[i]).epsilon(1e-12).margin(1e-12));
}

template <class Call>
std::string message(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// ---- activations -------------------------------------------------------------------------------

// In eps of y for x > -12. Without fused multiply-adds x^2 is rounded, up to 36 eps in e^(-x^2/2).
constexpr double kTailError = heed::kFusesMultiplyAdd ? 6 : 80;

long double sigmoid(long double x) { return 1 / (1 + std::exp(-x)); }

constexpr long double kRoot2OverPi = 0.797884560802865355879892119868763737L;

long double exact_value(Activation f, long double x) {
  if (f == Activation::gelu_erf) return x * std::erfc(-x / std::sqrt(2.0L)) / 2;
  if (f == Activation::silu) return x * sigmoid(x);
  return x * (1 + std::tanh(kRoot2OverPi * (x + 0.044715L * x * x * x))) / 2;
}

long double exact_slope(Activation f, long double x) {
  if (f == Activation::gelu_erf)
    return std::erfc(-x / std::sqrt(2.0L)) / 2 + x * std::exp(-x * x / 2) * kRoot2OverPi / 2;
  if (f == Activation::silu) return sigmoid(x) * (1 + x * sigmoid(-x));
  const long double t = std::tanh(kRoot2OverPi * (x + 0.044715L * x * x * x));
  return (1 + t) / 2 + x * (1 - t * t) * kRoot2OverPi * (1 + 3 * 0.044715L * x * x) / 2;
}

template <class T>
T value_at(Activation f, T x) {
  Context<T> c;
  T y = T(7);
  activate(c, f, {&x, 1, 1}, {&y, 1, 1});
  return y;
}
template <class T>
T slope_at(Activation f, T x) {
  Context<T> c;
  T one = T(1), dx = T(7);
  activate_backward(c, f, {&x, 1, 1}, {&one, 1, 1}, {&dx, 1, 1});
  return dx;
}

}  // namespace

TEMPLATE_TEST_CASE("activations are as accurate as their header says", "[nn]", float, double) {
  using T = TestType;
  const double eps = std::numeric_limits<T>::epsilon();
  const Index count = 40001;
  std::vector<T> x, one(std::size_t(count), T(1)), y(one), slope(one);
  for (Index i = 0; i < count; ++i) x.push_back(T(-20 + 40.0 * double(i) / double(count - 1)));
  Context<T> c;
  for (const Activation f : kActivations) {
    activate(c, f, {x.data(), 1, count}, {y.data(), 1, count});
    activate_backward(c, f, {x.data(), 1, count}, {one.data(), 1, count}, {slope.data(), 1, count});
    double value_error = 0, slope_error = 0, tail_error = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const long double value = exact_value(f, x[i]);
      const double at = double(x[i]), error = double(std::abs(y[i] - value));
      value_error = std::max(value_error, error / std::max(1.0, std::abs(at)));
      slope_error = std::max(slope_error, double(std::abs(slope[i] - exact_slope(f, x[i]))));
      if (at < 0 && at > -12) tail_error = std::max(tail_error, error / double(std::abs(value)));
    }
    INFO("activation " << int(f));
    CHECK(value_error < 1.2 * eps);
    CHECK(slope_error < 2.2 * eps);
    if (f == Activation::gelu_erf) CHECK(tail_error < kTailError * eps);
  }
}

TEMPLATE_TEST_CASE("activations have their limits at infinity and keep a NaN", "[nn]", float,
                   double) {
  using T = TestType;
  const T infinity = std::numeric_limits<T>::infinity(), top = std::numeric_limits<T>::max();
  for (const Activation f : kActivations) {
    CHECK(value_at(f, infinity) == infinity);
    CHECK(value_at(f, -infinity) == 0);
    CHECK(value_at(f, top) == top);
    CHECK(value_at(f, -top) == 0);
    CHECK(value_at(f, T(0)) == 0);
    CHECK(slope_at(f, infinity) == 1);
    CHECK(slope_at(f, -infinity) == 0);
    CHECK(slope_at(f, top) == 1);
    CHECK(slope_at(f, -top) == 0);
    CHECK(slope_at(f, T(0)) == T(0.5));
    CHECK(std::isnan(value_at(f, std::numeric_limits<T>::quiet_NaN())));
    CHECK(std::isnan(slope_at(f, std::numeric_limits<T>::quiet_NaN())));
  }
}

TEST_CASE("activations have the values of tables", "[nn]") {
  CHECK(value_at(Activation::gelu_erf, 1.0) == Approx(0.84134474606854293).epsilon(1e-15));
  CHECK(value_at(Activation::gelu_erf, -1.0) == Approx(-0.15865525393145705).epsilon(1e-15));
  CHECK(value_at(Activation::gelu_tanh, 1.0) == Approx(0.84119199060827676).epsilon(1e-14));
  CHECK(value_at(Activation::silu, 1.0) == Approx(0.73105857863000490).epsilon(1e-15));
  CHECK(value_at(Activation::silu, -2.0) == Approx(-0.23840584404423515).epsilon(1e-15));
}

TEST_CASE("activations work in place on ranges of columns", "[nn]") {
  for (const Activation f : kActivations) {
    Matrix<double> wide = random_matrix<double>(5, 20, 1);
    const Matrix<double> g = random_matrix<double>(5, 11, 2);
    Matrix<double> before(5, 20), dx(5, 11);
    std::copy(wide.view().data, wide.view().data + 100, before.view().data);
    Context<double> c;
    const MatrixView<double> x = wide.view().column_range(3, 11);
    activate_backward(c, f, x, g.view(), dx.view());
    activate(c, f, x, x);
    for (Index r = 0; r < 5; ++r)
      for (Index j = 0; j < 20; ++j) {
        const double old = before.view().row(r)[j], now = wide.view().row(r)[j];
        if (j < 3 || j >= 14) {
          CHECK(now == old);
          continue;
        }
        CHECK(now == Approx(double(exact_value(f, old))).epsilon(1e-13));
        const double expected = double(exact_slope(f, old)) * g.view().row(r)[j - 3];
        CHECK(dx.view().row(r)[j - 3] == Approx(expected).epsilon(1e-13));
      }
  }
}

TEST_CASE("activations do not depend on the number of threads", "[nn]") {
  const Matrix<float> x = random_matrix<float>(700, 301, 1, 3);
  const Matrix<float> g = random_matrix<float>(700, 301, 2);
  for (const Activation f : kActivations) {
    std::vector<float> results[2];
    for (const int many : {0, 1}) {
      Context<float> c;
      c.threads = many ? 3 : 1;
      Matrix<float> y(700, 301), dx(700, 301);
      activate(c, f, x.view(), y.view());
      activate_backward(c, f, x.view(), g.view(), dx.view());
      results[many] = numbers(y.view());
      const auto more = numbers(dx.view());
      results[many].insert(results[many].end(), more.begin(), more.end());
    }
    CHECK(same_bits(results[0], results[1]));
  }
}

TEST_CASE("activations are found by name", "[nn]") {
  CHECK(activation_named("gelu") == Activation::gelu_erf);
  CHECK(activation_named("gelu_tanh") == Activation::gelu_tanh);
  CHECK(activation_named("silu") == Activation::silu);
  CHECK(message([] { (void)activation_named("relu"); }) ==
        "activation_named: name is \"relu\", it must be gelu, gelu_tanh or silu");
}

TEST_CASE("activations refuse matrices of other extents", "[nn]") {
  Context<float> c;
  Matrix<float> x(2, 3), y(2, 4);
  CHECK(message([&] { activate(c, Activation::silu, x.view(), y.view()); }) ==
        "activate: y is 2 x 4, it must be 2 x 3");
  CHECK(message([&] { activate_backward(c, Activation::silu, x.view(), y.view(), x.view()); }) ==
        "activate_backward: dy is 2 x 4, it must be 2 x 3");
  CHECK(message([&] { activate_backward(c, Activation::silu, x.view(), x.view(), y.view()); }) ==
        "activate_backward: dx is 2 x 4, it must be 2 x 3");
}

// ---- Linear ------------------------------------------------------------------------------------

TEST_CASE("Linear is x W^T + b on numbers by hand", "[nn]") {
  Linear<double> layer(2, 3, true);
  layer.weight.value = Param<double>({3, 2}, {1, 2, 3, 4, 5, 6});
  layer.bias.value = {10, 20, 30};
  Context<double> c;
  const double x[] = {1, -1, 2, 1}, dy[] = {1, 0, -1, 0, 2, 1};
  double y[6], dx[4];
  layer.forward(c, {x, 2, 2}, {y, 2, 3});
  CHECK(std::vector<double>(y, y + 6) == std::vector<double>{9, 19, 29, 14, 30, 46});
  layer.backward(c, {x, 2, 2}, {dy, 2, 3}, {dx, 2, 2});
  CHECK(std::vector<double>(dx, dx + 4) == std::vector<double>{-4, -4, 11, 14});
  CHECK(gradients<double>(layer) == std::vector<double>{1, -1, 4, 2, 1, 2, 1, 2, 0});
}

TEST_CASE("Linear has the gradient of its forward pass", "[nn]") {
  Linear<double> with(7, 5, true), without(9, 3, false), deep(3, 40, true);
  check_layer(with, 6, 7, 5);
  check_layer(without, 2, 9, 3);
  check_layer(deep, 11, 3, 40);
}

TEST_CASE("Linear adds where it is told to and does without dx", "[nn]") {
  Linear<double> layer(7, 5, true);
  check_adding(layer, 6, 7, 5);
}

TEST_CASE("Linear in float is Linear in double, with any number of threads", "[nn]") {
  const auto make = [](auto zero) { return Linear<decltype(zero)>(70, 130, true); };
  check_float_and_threads(make, 200, 70, 130);
}

TEST_CASE("Linear refuses matrices of other extents", "[nn]") {
  Context<float> c;
  Linear<float> layer(3, 4, false);
  Matrix<float> x(2, 3), y(2, 4);
  CHECK(message([&] { layer.forward(c, y.view(), y.view()); }) ==
        "Linear::forward: x is 2 x 4, it must be 2 x 3");
  CHECK(message([&] { layer.forward(c, x.view(), x.view()); }) ==
        "Linear::forward: y is 2 x 3, it must be 2 x 4");
  CHECK(message([&] { layer.backward(c, x.view(), x.view(), {}); }) ==
        "Linear::backward: dy is 2 x 3, it must be 2 x 4");
}

// ---- norms -------------------------------------------------------------------------------------

TEST_CASE("LayerNorm normalises rows by hand", "[nn]") {
  LayerNorm<double> layer(2, 1e-12);
  CHECK(names<double>(layer) == std::vector<std::string>{"weight", "bias"});
  Context<double> c;
  const double x[] = {1, 5, -3, -7};
  double y[4];
  layer.forward(c, {x, 2, 2}, {y, 2, 2});
  const double plain[] = {-1, 1, 1, -1};
  for (int i = 0; i < 4; ++i) CHECK(y[i] == Approx(plain[i]));
  layer.weight.value = {2, 3};
  layer.bias.value = {10, 20};
  layer.forward(c, {x, 2, 2}, {y, 2, 2});
  const double scaled[] = {8, 23, 12, 17};
  for (int i = 0; i < 4; ++i) CHECK(y[i] == Approx(scaled[i]));
}

TEST_CASE("RMSNorm divides by the root mean square by hand", "[nn]") {
  RMSNorm<double> layer(2, 1e-12);
  CHECK(names<double>(layer) == std::vector<std::string>{"weight"});
  layer.weight.value = {1, 2};
  Context<double> c;
  const double x[] = {1, 7, -3, 4};
  double y[4];
  layer.forward(c, {x, 1, 4}, {y, 1, 4});
  const double root = std::sqrt(12.5), expected[] = {0.2, 2.8, -3 / root, 8 / root};
  for (int i = 0; i < 4; ++i) CHECK(y[i] == Approx(expected[i]));
  RMSNorm<double> plain(2, 1e-12, false);
  CHECK(names<double>(plain).empty());
  plain.forward(c, {x, 1, 4}, {y, 1, 4});
  CHECK(y[1] == Approx(1.4));
  CHECK(y[3] == Approx(4 / root));
}

TEST_CASE("eps stands under the root, and rows without variance are the bias", "[nn]") {
  LayerNorm<double> layer(3);
  layer.bias.value = {1, 2, 3};
  RMSNorm<double> rms(3);
  Context<double> c;
  const double same[] = {5, 5, 5}, zero[] = {0, 0, 0}, small[] = {-1e-3, 0, 1e-3};
  double y[3];
  layer.forward(c, {same, 1, 3}, {y, 1, 3});
  CHECK(std::vector<double>(y, y + 3) == std::vector<double>{1, 2, 3});
  rms.forward(c, {zero, 1, 3}, {y, 1, 3});
  CHECK(std::vector<double>(y, y + 3) == std::vector<double>{0, 0, 0});
  layer.forward(c, {small, 1, 3}, {y, 1, 3});
  CHECK(y[2] == Approx(3 + 1e-3 / std::sqrt(2e-6 / 3 + 1e-5)));
  rms.forward(c, {small, 1, 3}, {y, 1, 3});
  CHECK(y[2] == Approx(1e-3 / std::sqrt(2e-6 / 3 + 1e-6)));
}

TEST_CASE("norms have the gradient of their forward pass", "[nn]") {
  for (const Index width : {2, 7, 8, 45}) {
    LayerNorm<double> layer(width);
    check_layer(layer, 5, width, width);
    RMSNorm<double> rms(width);
    check_layer(rms, 5, width, width);
    RMSNorm<double> plain(width, 1e-6, false);
    check_layer(plain, 5, width, width);
  }
  RMSNorm<double> heads(6);
  check_layer(heads, 4, 18, 18);
  LayerNorm<double> long_rows(3);
  check_layer(long_rows, 150, 3, 3);
}

TEST_CASE("norms add where they are told to and do without dx", "[nn]") {
  LayerNorm<double> layer(13);
  check_adding(layer, 6, 13, 13);
  RMSNorm<double> rms(13);
  check_adding(rms, 6, 26, 26);
}

TEST_CASE("norms in float are norms in double, with any number of threads", "[nn]") {
  check_float_and_threads([](auto zero) { return LayerNorm<decltype(zero)>(203); }, 1500, 203, 203);
  check_float_and_threads([](auto zero) { return RMSNorm<decltype(zero)>(32); }, 1500, 192, 192);
}

TEST_CASE("the variance does not suffer from a large mean", "[nn]") {
  constexpr Index width = 100;
  Matrix<float> x = random_matrix<float>(1, width, 1), y(1, width);
  Matrix<double> wide(1, width), exact(1, width);
  for (Index j = 0; j < width; ++j) {
    x.view().data[j] += 10000;
    wide.view().data[j] = x.view().data[j];
  }
  Context<float> c;
  Context<double> c64;
  LayerNorm<float>(width).forward(c, x.view(), y.view());
  LayerNorm<double>(width).forward(c64, wide.view(), exact.view());
  // The mean is rounded to 1e-3; E[x^2] - E[x]^2 would be off by 8.
  CHECK(largest_difference(numbers(y.view()), numbers(exact.view())) < 2e-3);
}

TEST_CASE("norms take ranges of columns, in place, and dx in the place of dy", "[nn]") {
  const auto run = [](auto& layer) {
    constexpr Index rows = 5, columns = 12;
    randomise<double>(layer);
    Context<double> c;
    const Matrix<double> x = random_matrix<double>(rows, columns, 1);
    const Matrix<double> g = random_matrix<double>(rows, columns, 2);
    Matrix<double> y(rows, columns), dx(rows, columns);
    layer.forward(c, x.view(), y.view());
    layer.backward(c, x.view(), g.view(), dx.view());
    const auto dense = gradients<double>(layer);
    clear_gradients<double>(layer);
    Matrix<double> a = filled(rows, Index(30), 99.0), b = filled(rows, Index(30), 99.0);
    const MatrixView<double> x2 = a.view().column_range(7, columns);
    const MatrixView<double> g2 = b.view().column_range(11, columns);
    for (Index r = 0; r < rows; ++r) {
      std::copy(x.view().row(r), x.view().row(r) + columns, x2.row(r));
      std::copy(g.view().row(r), g.view().row(r) + columns, g2.row(r));
    }
    layer.backward(c, x2, g2, g2);
    CHECK(same_bits(numbers(g2), numbers(dx.view())));
    CHECK(same_bits(gradients<double>(layer), dense));
    layer.forward(c, x2, x2);
    CHECK(same_bits(numbers(x2), numbers(y.view())));
    for (Index r = 0; r < rows; ++r) {
      CHECK(a.view().row(r)[6] == 99);
      CHECK(a.view().row(r)[7 + columns] == 99);
      CHECK(b.view().row(r)[10] == 99);
      CHECK(b.view().row(r)[11 + columns] == 99);
    }
  };
  LayerNorm<double> layer(12);
  run(layer);
  RMSNorm<double> heads(3);
  run(heads);
}

TEST_CASE("norms refuse what they cannot take", "[nn]") {
  CHECK(message([] { LayerNorm<float>(0); }) == "LayerNorm: width is 0, it must be positive");
  CHECK(message([] { RMSNorm<float>(4, 0.0); }) == "RMSNorm: eps is 0, it must be positive");
  Context<float> c;
  Matrix<float> x(2, 6), y(2, 5);
  LayerNorm<float> layer(5);
  RMSNorm<float> rms(4), three(3);
  CHECK(message([&] { layer.forward(c, x.view(), x.view()); }) ==
        "LayerNorm::forward: x is 2 x 6, it must be 2 x 5");
  CHECK(message([&] { rms.forward(c, x.view(), x.view()); }) ==
        "RMSNorm::forward: x has 6 columns, it must have a multiple of the width 4");
  CHECK(message([&] { three.backward(c, x.view(), x.view(), y.view()); }) ==
        "RMSNorm::backward: dx is 2 x 5, it must be 2 x 6");
}

// ---- rotary embedding --------------------------------------------------------------------------

TEST_CASE("Rope turns pairs by hand", "[nn]") {
  Context<double> c;
  const double c2 = std::cos(2.0), s2 = std::sin(2.0);
  const double c02 = std::cos(0.02), s02 = std::sin(0.02);
  // Two sequences of one token at position 2; the frequencies are 1 and 1/100.
  double x[] = {1, 2, 3, 4, 1, 0, 0, 1};
  Rope rope{4, 10000, RopePairs::interleaved};
  rope.rotate(c, MatrixView<double>(x, 2, 4), 1, 2);
  const double interleaved[] = {
      c2 - 2 * s2, s2 + 2 * c2, 3 * c02 - 4 * s02, 3 * s02 + 4 * c02, c2, s2, -s02, c02};
  for (int i = 0; i < 8; ++i) CHECK(x[i] == Approx(interleaved[i]).epsilon(1e-14));
  double z[] = {1, 2, 3, 4, 1, 0, 0, 1};
  rope.pairs = RopePairs::halves;
  rope.rotate(c, MatrixView<double>(z, 2, 4), 1, 2);
  const double half[] = {
      c2 - 3 * s2, 2 * c02 - 4 * s02, s2 + 3 * c2, 2 * s02 + 4 * c02, c2, -s02, s2, c02};
  for (int i = 0; i < 8; ++i) CHECK(z[i] == Approx(half[i]).epsilon(1e-14));
}

TEMPLATE_TEST_CASE("Rope is the formula at every position, in every head", "[nn]", float, double) {
  using T = TestType;
  // Roundings of cosine, sine and their products, and of angles up to 137.
  const double rounding = 4 * double(std::numeric_limits<T>::epsilon());
  const double tolerance = rounding + 2 * 137 * std::numeric_limits<double>::epsilon();
  for (const RopePairs pairs : {RopePairs::interleaved, RopePairs::halves})
    for (const Index dim : {2, 6, 16, 38}) {
      const Index len = 37, heads = 3, rows = 2 * len, first = 100;
      Matrix<T> wide = random_matrix<T>(rows, heads * dim + 5, 1);
      const Matrix<T> before = random_matrix<T>(rows, heads * dim + 5, 1);
      const Rope rope{dim, 500, pairs};
      Context<T> c;
      rope.rotate(c, wide.view().column_range(2, heads * dim), len, first);
      double error = 0;
      for (Index r = 0; r < rows; ++r) {
        const T *from = before.view().row(r) + 2, *to = wide.view().row(r) + 2;
        CHECK(to[-1] == from[-1]);
        CHECK(to[heads * dim] == from[heads * dim]);
        for (Index h = 0; h < heads; ++h)
          for (Index m = 0; m < dim / 2; ++m) {
            const double angle =
                double(first + r % len) * std::pow(500.0, -2.0 * double(m) / double(dim));
            const Index i = h * dim + (pairs == RopePairs::halves ? m : 2 * m);
            const Index k = pairs == RopePairs::halves ? i + dim / 2 : i + 1;
            const double a = from[i], b = from[k];
            const double turned_a = a * std::cos(angle) - b * std::sin(angle);
            const double turned_b = a * std::sin(angle) + b * std::cos(angle);
            error = std::max({error, std::abs(to[i] - turned_a), std::abs(to[k] - turned_b)});
          }
      }
      CHECK(error < 4 * tolerance);  // the largest of the random numbers is about 4
    }
}

TEST_CASE("Rope backward is the transposed rotation", "[nn]") {
  for (const RopePairs pairs : {RopePairs::interleaved, RopePairs::halves}) {
    const Index rows = 6, columns = 20, len = 3;
    const Rope rope{10, 10000, pairs};
    Context<double> c;
    const Matrix<double> x = random_matrix<double>(rows, columns, 1);
    Matrix<double> dx = random_matrix<double>(rows, columns, 2);
    const auto g = numbers(dx.view());
    rope.rotate(c, dx.view(), len, 4, RopeDirection::backward);
    const auto loss = [&](const std::vector<std::vector<double>>& tensors) {
      std::vector<double> y = tensors[0];
      rope.rotate(c, MatrixView<double>(y.data(), rows, columns), len, 4);
      double sum = 0;
      for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * g[i];
      return sum;
    };
    const std::vector<NamedTensor> at = {{"x", numbers(x.view())}};
    const std::vector<NamedTensor> analytic = {{"x", numbers(dx.view())}};
    const auto report = check_gradient_on<double>(loss, at, analytic);
    INFO(report.text());
    CHECK(report.passed);
  }
}

TEST_CASE("Rope does not depend on the number of threads, nor on where a sequence is cut", "[nn]") {
  const Index len = 500, columns = 320;
  for (const RopePairs pairs : {RopePairs::interleaved, RopePairs::halves}) {
    const Rope rope{32, 10000, pairs};
    std::vector<float> results[2];
    for (const int many : {0, 1}) {
      Matrix<float> x = random_matrix<float>(2 * len, columns, 1);
      Context<float> c;
      c.threads = many ? 3 : 1;
      rope.rotate(c, x.view(), len, 0);
      results[many] = numbers(x.view());
    }
    CHECK(same_bits(results[0], results[1]));
    Matrix<float> x = random_matrix<float>(2 * len, columns, 1);
    Context<float> c;
    for (Index r = 0; r < len; r += 100) rope.rotate(c, x.view().row_range(r, 100), 100, r);
    rope.rotate(c, x.view().row_range(len, len), len, 0);
    CHECK(largest_difference(numbers(x.view()), results[0]) < 1e-6);
  }
}

TEST_CASE("Rope refuses what it cannot turn", "[nn]") {
  Context<float> c;
  Matrix<float> x(6, 8);
  CHECK(message([&] { Rope{3}.rotate(c, x.view(), 1, 0); }) ==
        "Rope::rotate: dim is 3, it must be even and positive");
  CHECK(message([&] {
          Rope{4, -1.0}.rotate(c, x.view(), 1, 0);
        }) == "Rope::rotate: theta is -1, it must be positive");
  CHECK(message([&] { Rope{6}.rotate(c, x.view(), 1, 0); }) ==
        "Rope::rotate: x has 8 columns, it must have a multiple of dim 6");
  CHECK(message([&] { Rope{4}.rotate(c, x.view(), 4, 0); }) ==
        "Rope::rotate: x has 6 rows, it must have a multiple of len 4");
}

// ---- feed-forward ------------------------------------------------------------------------------

TEST_CASE("Mlp is its two layers around the activation", "[nn]") {
  Mlp<double> layer(1, 2, Activation::silu, true, "c_fc", "c_proj");
  CHECK(names<double>(layer) ==
        std::vector<std::string>{"c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"});
  layer.first.weight.value = Param<double>({2, 1}, {1, -2});
  layer.first.bias.value = {0, 1};
  layer.second.weight.value = Param<double>({1, 2}, {3, 5});
  layer.second.bias.value = {7.0};
  Context<double> c;
  const double x = 2;
  double y = 0;
  layer.forward(c, {&x, 1, 1}, {&y, 1, 1});
  const double h0 = double(exact_value(Activation::silu, 2));
  const double h1 = double(exact_value(Activation::silu, -3));
  CHECK(y == Approx(3 * h0 + 5 * h1 + 7).epsilon(1e-14));
  Mlp<double> bare(3, 4, Activation::silu, false, "0", "2");
  CHECK(names<double>(bare) == std::vector<std::string>{"0.weight", "2.weight"});
}

TEST_CASE("SwiGlu is its three layers by hand", "[nn]") {
  SwiGlu<double> layer(1, 2);
  CHECK(names<double>(layer) ==
        std::vector<std::string>{"gate.weight", "up.weight", "down.weight"});
  layer.gate.weight.value = Param<double>({2, 1}, {1, -2});
  layer.up.weight.value = Param<double>({2, 1}, {4, 0.5});
  layer.down.weight.value = Param<double>({1, 2}, {3, 5});
  Context<double> c;
  const double x = 2;
  double y = 0;
  layer.forward(c, {&x, 1, 1}, {&y, 1, 1});
  const double g0 = double(exact_value(Activation::silu, 2));
  const double g1 = double(exact_value(Activation::silu, -4));
  CHECK(y == Approx(3 * g0 * 8 + 5 * g1 * 1).epsilon(1e-14));
}

TEST_CASE("feed-forward layers have the gradient of their forward pass", "[nn]") {
  for (const Activation f : kActivations)
    for (const bool with_bias : {false, true}) {
      Mlp<double> layer(5, 11, f, with_bias, "0", "2");
      check_layer(layer, 7, 5, 5);
    }
  SwiGlu<double> gated(5, 11);
  check_layer(gated, 7, 5, 5);
}

TEST_CASE("feed-forward layers add where they are told to and do without dx", "[nn]") {
  Mlp<double> layer(5, 11, Activation::gelu_tanh, true, "0", "2");
  check_adding(layer, 7, 5, 5);
  SwiGlu<double> gated(5, 11);
  check_adding(gated, 7, 5, 5);
}

TEST_CASE("feed-forward layers write dx in the place of dy", "[nn]") {
  const auto run = [](auto layer) {
    randomise<double>(layer);
    Context<double> c;
    const Matrix<double> x = random_matrix<double>(6, 5, 1);
    Matrix<double> g = random_matrix<double>(6, 5, 2), y(6, 5), dx(6, 5);
    layer.forward(c, x.view(), y.view());
    layer.backward(c, x.view(), g.view(), dx.view());
    layer.backward(c, x.view(), g.view(), g.view());
    CHECK(same_bits(numbers(g.view()), numbers(dx.view())));
  };
  run(Mlp<double>(5, 11, Activation::gelu_erf, true, "0", "2"));
  run(SwiGlu<double>(5, 11));
}

TEST_CASE("feed-forward layers in float are those in double, with any number of threads", "[nn]") {
  const auto mlp = [](auto zero) {
    return Mlp<decltype(zero)>(40, 160, Activation::gelu_erf, true, "0", "2");
  };
  check_float_and_threads(mlp, 900, 40, 40);
  check_float_and_threads([](auto zero) { return SwiGlu<decltype(zero)>(40, 160); }, 900, 40, 40);
}

TEST_CASE("feed-forward layers refuse a backward pass without its forward pass", "[nn]") {
  Context<float> c;
  Matrix<float> x = filled(3, 4, 1.0F), y(3, 4);
  Mlp<float> layer(4, 8, Activation::silu, true, "0", "2");
  CHECK(message([&] { layer.backward(c, x.view(), x.view(), y.view()); }) ==
        "Mlp::backward: x has 3 rows, forward's had 0");
  layer.forward(c, x.view().row_range(0, 2), y.view().row_range(0, 2));
  CHECK(message([&] { layer.backward(c, x.view(), x.view(), y.view()); }) ==
        "Mlp::backward: x has 3 rows, forward's had 2");
  SwiGlu<float> gated(4, 8);
  CHECK(message([&] { gated.backward(c, x.view(), x.view(), y.view()); }) ==
        "SwiGlu::backward: x has 3 rows, forward's had 0");
  CHECK(message([&] { gated.forward(c, x.view().column_range(0, 3), y.view()); }) ==
        "SwiGlu::forward: x is 3 x 3, it must be 3 x 4");
}
