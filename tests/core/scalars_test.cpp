// SPDX-License-Identifier: Apache-2.0
#include <heed/autodiff/complex_step.hpp>
#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/core/scalar.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/functions.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace math = heed::math;
using heed::Dual;
using heed::Index;
using heed::Tape;
using heed::Var;
using Complex = std::complex<double>;
using Dual1 = Dual<double, 1>;

namespace {

typedef double TwoDoubles __attribute__((vector_size(16)));

}  // namespace

// A vector_size type gets its functions after dual.hpp has been read: Lookup finds them.
namespace heed {
inline namespace HEED_ABI {
namespace math {

TwoDoubles exp(const TwoDoubles& x, Lookup) { return TwoDoubles{std::exp(x[0]), std::exp(x[1])}; }
TwoDoubles log(const TwoDoubles& x, Lookup) { return TwoDoubles{std::log(x[0]), std::log(x[1])}; }
TwoDoubles sqrt(const TwoDoubles& x, Lookup) {
  return TwoDoubles{std::sqrt(x[0]), std::sqrt(x[1])};
}
TwoDoubles tanh(const TwoDoubles& x, Lookup) {
  return TwoDoubles{std::tanh(x[0]), std::tanh(x[1])};
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class F>
double by_dual(const F& f, double x) {
  return Dual1(f(Dual1::variable(x))).grad[0];
}

template <class F>
double by_tape(const F& f, double x) {
  Tape<double> tape;
  const Var<double> v = tape.variable(x);
  return tape.gradient(f(v))[std::size_t(v.index)];
}

template <class F>
double by_complex_step(const F& f, double x) {
  return Complex(f(Complex(x, 1e-30))).imag() / 1e-30;
}

// Five points in long double, h = 1e-5: rounding about 1e-14, truncation h^4 / 30 times f's fifth
// derivative.
template <class F>
double by_difference(const F& f, double x) {
  const long double h = 1e-5L, centre = x;
  const long double inner = f(centre + h) - f(centre - h);
  const long double outer = f(centre + 2 * h) - f(centre - 2 * h);
  return double((8 * inner - outer) / (12 * h));
}

template <class F>
void require_same_derivative(const F& f, const std::vector<double>& points) {
  for (const double x : points) {
    CAPTURE(x);
    const double expected = by_difference(f, x);
    const double bound = 1e-11 * std::max(1.0, std::abs(expected));
    CHECK(std::abs(by_dual(f, x) - expected) <= bound);
    CHECK(std::abs(by_tape(f, x) - expected) <= bound);
    CHECK(std::abs(by_complex_step(f, x) - expected) <= bound);
    const double value = f(x);
    const double roundings = 4e-15 * std::max(1.0, std::abs(value));  // a * b + c fused or not
    CHECK(std::abs(f(Dual1(x)).value - value) <= roundings);
    CHECK(std::abs(f(Var<double>(x)).value - value) <= roundings);
    CHECK(std::abs(f(Complex(x)).real() - value) <= roundings);
    CHECK(std::abs(f(float(x)) - float(value)) <= 1e-5 * std::max(1.0, std::abs(value)));
  }
}

// Every word at least once, smooth where it is used: a softmax row with a gate and a norm.
template <class S>
S row(const std::vector<S>& x, const std::vector<S>& w) {
  const Index n = Index(x.size());
  const auto at = [](const std::vector<S>& v) {
    return [&v](Index i) { return v[std::size_t(i)]; };
  };
  const S norm = math::sqrt(S(math::dot_product(n, at(x), at(x)) + math::constant<S>(0.25)));
  S top = math::constant<S>(-1e300);
  for (const S& xi : x) top = math::maximum(top, xi);
  S sum = math::constant<S>(0), mixed = math::constant<S>(0);
  for (Index i = 0; i < n; ++i) {
    const S p = math::exp(S(at(x)(i) - top));
    sum += p;
    mixed += p * math::tanh(at(w)(i)) / norm;
  }
  const S gate = math::sigmoid(S(mixed - math::absolute(w[0])));
  return gate * math::log(sum) - math::select(math::value_of(sum) > 0, mixed / sum, sum);
}

std::vector<double> random_values(Index n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& value : values) value = normal(random);
  return values;
}

template <class S>
std::vector<S> cast(const std::vector<double>& v) {
  return std::vector<S>(v.begin(), v.end());
}

}  // namespace

TEST_CASE("every function has the derivative of its long double difference quotient") {
  const std::vector<double> line = {-30, -3.25, -1, -0.3, 1e-3, 0.5, 1, 2.75, 7, 30};
  const std::vector<double> positive = {0.05, 0.3, 1, 1.5, 20, 300};
  require_same_derivative([](auto x) { return math::exp(x); }, {-30, -2, -0.1, 0, 0.7, 3});
  require_same_derivative([](auto x) { return math::log(x); }, positive);
  require_same_derivative([](auto x) { return math::sqrt(x); }, positive);
  require_same_derivative([](auto x) { return math::tanh(x); }, line);
  require_same_derivative([](auto x) { return math::sigmoid(x); }, line);
  require_same_derivative([](auto x) { return math::absolute(x); }, line);
  require_same_derivative([](auto x) { return math::maximum(x, decltype(x)(0.25F)); }, line);
  require_same_derivative([](auto x) { return math::maximum(decltype(x)(0.25F), x); }, line);
  require_same_derivative(
      [](auto x) { return math::select(math::value_of(x) < 0, decltype(x)(x * x), x); }, line);
}

TEST_CASE("every operator has the derivative of its long double difference quotient") {
  const std::vector<double> points = {-3.25, -1, -0.3, 0.5, 1, 2.75, 7};
  require_same_derivative([](auto x) { return x + x * x; }, points);
  require_same_derivative([](auto x) { return x * x - x; }, points);
  require_same_derivative([](auto x) { return -x * x * x; }, points);
  require_same_derivative([](auto x) { return (x * x + x) / (x * x * x * x + x * x); }, points);
  require_same_derivative([](auto x) { return +x; }, points);
  const auto two = [](auto x) { return math::constant<decltype(x)>(2); };
  require_same_derivative([=](auto x) { return two(x) / x; }, points);
  require_same_derivative([=](auto x) { return two(x) - x; }, points);
  require_same_derivative(
      [=](auto x) {
        auto y = x;
        y *= x, y += two(x), y /= x, y -= x * x;
        return y;
      },
      points);
}

TEST_CASE("constants of T and of any number type mix with Dual and Var") {
  const auto check = [](auto x, auto slope) {
    CHECK(slope(x + 2) == 1);
    CHECK(slope(2 + x) == 1);
    CHECK(slope(x - 2.0F) == 1);
    CHECK(slope(2.0 - x) == -1);
    CHECK(slope(x * 3) == 3);
    CHECK(slope(3.0L * x) == 3);
    CHECK(slope(x / 4) == 0.25);
    CHECK(slope(8 / x) == -2);  // at x = 2: -8 / 4
    CHECK((8 / x).value == 4);
    CHECK((2.0 - x).value == 0);
    CHECK(x > 1);
    CHECK(3 > x);
    CHECK(x == 2);
    CHECK_FALSE(x != 2.0);
    CHECK(x <= x);
  };
  check(Dual<double, 3>::variable(2, 1), [](const Dual<double, 3>& y) {
    CHECK(y.grad[0] == 0);
    CHECK(y.grad[2] == 0);
    return y.grad[1];
  });
  check(Dual<float, 1>::variable(2), [](const Dual<float, 1>& y) { return y.grad[0]; });
  Tape<double> tape;
  const Var<double> v = tape.variable(2);
  check(v, [&](const Var<double>& y) { return tape.gradient(y)[std::size_t(v.index)]; });
}

TEST_CASE("tape, dual numbers and complex step agree on a composite function") {
  const std::vector<double> x = random_values(7, 1), w = random_values(7, 2);
  Tape<double> tape;
  std::vector<Var<double>> xv, wv;
  for (const double value : x) xv.push_back(tape.variable(value));
  for (const double value : w) wv.push_back(tape.variable(value));
  const Var<double> root = row(xv, wv);
  CHECK(root.value == Approx(row(x, w)).epsilon(1e-14));
  const std::vector<double> adjoint = tape.gradient(root);

  for (int k = 0; k < 14; ++k) {
    CAPTURE(k);
    auto xd = cast<Dual<double, 14>>(x), wd = cast<Dual<double, 14>>(w);
    for (int i = 0; i < 7; ++i) {
      xd[std::size_t(i)].grad[std::size_t(i)] = 1;
      wd[std::size_t(i)].grad[std::size_t(i + 7)] = 1;
    }
    auto xc = cast<Complex>(x), wc = cast<Complex>(w);
    auto xl = cast<long double>(x), wl = cast<long double>(w);
    const std::size_t i = std::size_t(k % 7);
    (k < 7 ? xc : wc)[i] += Complex(0, 1e-30);
    long double& entry = (k < 7 ? xl : wl)[i];
    const long double kept = entry, h = 1e-6L;
    entry = kept + h;
    const long double above = row(xl, wl);
    entry = kept - h;
    const double difference = double((above - row(xl, wl)) / (2 * h));

    const double reverse = adjoint[std::size_t((k < 7 ? xv : wv)[i].index)];
    CHECK(std::abs(reverse) > 1e-4);
    CHECK(std::abs(reverse - difference) < 1e-11);
    CHECK(std::abs(reverse - row(xd, wd).grad[std::size_t(k)]) < 1e-14);
    CHECK(std::abs(reverse - row(xc, wc).imag() / 1e-30) < 1e-14);
  }
}

TEST_CASE("far from 0 sigmoid, tanh and their slopes keep their digits and never overflow") {
  const auto gate = [](auto x) { return math::sigmoid(x); };
  const auto hyper = [](auto x) { return math::tanh(x); };
  for (const double x : {-600.0, -60.0, 60.0, 600.0}) {
    CAPTURE(x);
    const double tail = std::exp(-std::abs(x));
    CHECK(std::abs(gate(x) - (x < 0 ? tail : 1)) <= 1e-15 * gate(x));
    CHECK(std::abs(by_dual(gate, x) - tail) <= 1e-15 * tail);
    CHECK(std::abs(by_tape(gate, x) - tail) <= 1e-15 * tail);
    CHECK(std::abs(by_complex_step(gate, x) - tail) <= 1e-14 * tail);
  }
  for (const double x : {-300.0, -25.0, 25.0, 300.0}) {
    CAPTURE(x);
    const double tail = 4 * std::exp(-2 * std::abs(x));
    CHECK(std::abs(by_dual(hyper, x) - tail) <= 1e-15 * tail);
    CHECK(std::abs(by_tape(hyper, x) - tail) <= 1e-15 * tail);
  }
  CHECK(gate(-kInf) == 0);
  CHECK(gate(kInf) == 1);
  CHECK(gate(-1e30F) == 0);
  CHECK(gate(1e30F) == 1);
  CHECK(by_dual(gate, 1e30) == 0);
  CHECK(by_tape(hyper, -1e30) == 0);
  CHECK(gate(Complex(-1e30)).real() == 0);
  CHECK(gate(Complex(1e30)).real() == 1);
}

TEST_CASE("NaN and infinity propagate, and the branch not selected leaves no trace") {
  CHECK(std::isnan(math::sigmoid(kNan)));
  CHECK(std::isnan(math::maximum(kNan, 1.0)));
  CHECK(std::isnan(math::maximum(1.0, kNan)));
  CHECK(std::isnan(math::exp(Dual1(kNan)).value));
  CHECK(by_dual([](auto x) { return math::sqrt(x); }, 0.0) == kInf);
  CHECK(by_tape([](auto x) { return math::sqrt(x); }, 0.0) == kInf);
  CHECK(by_tape([](auto x) { return math::log(x); }, 0.0) == kInf);
  const auto product = [](auto x) { return x * math::constant<decltype(x)>(kNan); };
  CHECK(std::isnan(by_dual(product, 1)));
  CHECK(std::isnan(by_tape(product, 1)));
  const auto safe_norm = [](auto x) {
    using S = decltype(x);
    const S root = math::sqrt(S(x * x));
    return math::select(math::value_of(x) == 0, math::constant<S>(0), root) + x + x + x;
  };
  CHECK(by_dual(safe_norm, 0.0) == 3);
  CHECK(by_tape(safe_norm, 0.0) == 3);
  CHECK(by_tape(safe_norm, -2.0) == 2);
}

TEST_CASE("maximum and absolute return one of their arguments, derivative included") {
  Tape<double> tape;
  const Var<double> a = tape.variable(1), b = tape.variable(1), c = tape.variable(-3);
  CHECK(math::maximum(a, b).index == a.index);
  CHECK(math::maximum(c, b).index == b.index);
  CHECK(math::absolute(a).index == a.index);
  CHECK(tape.gradient(math::absolute(c))[std::size_t(c.index)] == -1);
  CHECK(by_dual([](auto x) { return math::absolute(x); }, 0.0) == 1);
}

TEST_CASE("value_of is the plain real part of every scalar") {
  STATIC_REQUIRE(std::is_same_v<decltype(math::value_of(1.0F)), float>);
  STATIC_REQUIRE(std::is_same_v<decltype(math::value_of(1.0L)), long double>);
  STATIC_REQUIRE(std::is_same_v<decltype(math::value_of(Complex())), double>);
  STATIC_REQUIRE(std::is_same_v<decltype(math::value_of(Var<float>())), float>);
  STATIC_REQUIRE(std::is_same_v<decltype(math::value_of(Dual<Dual1, 2>())), double>);
  CHECK(math::value_of(Complex(2, 3)) == 2);
  CHECK(math::value_of(Dual<Dual1, 2>(5)) == 5);
  CHECK(math::constant<std::complex<float>>(0.5).real() == 0.5F);
}

TEST_CASE("a dot product is one node and has the gradient of the loop, strides and constants too") {
  const Index n = 9;
  Tape<double> tape;
  std::vector<Var<double>> a, b;
  for (const double x : random_values(3 * n, 3)) a.push_back(tape.variable(x));
  for (const double x : random_values(2 * n, 4)) b.push_back(tape.variable(x));
  a[6] = Var<double>(a[6].value);  // constants among the factors: 1.5 on each side, one on both
  b[4] = Var<double>(b[4].value);
  b[10] = Var<double>(1.5);
  a[15] = Var<double>(-2);
  const Index before = tape.size();
  const Var<double> node = dot(a.data(), 3, b.data(), 2, n);
  CHECK(tape.size() == before + 1);
  Var<double> loop = 0;
  for (Index i = 0; i < n; ++i) loop += a[std::size_t(3 * i)] * b[std::size_t(2 * i)];
  CHECK(std::abs(node.value - loop.value) < 1e-14);

  const Var<double> later = tape.variable(7);  // nodes and dots behind the root are passed over
  const Var<double> other = dot(a.data(), 1, b.data(), 1, n) * later;
  const auto from_node = tape.gradient(node * node), from_loop = tape.gradient(loop * loop);
  for (Index i = 0; i < before; ++i)
    CHECK(std::abs(from_node[std::size_t(i)] - from_loop[std::size_t(i)]) < 1e-13);
  const std::vector<double> only_node = tape.gradient(node);
  CHECK(only_node[std::size_t(a[3].index)] == b[2].value);
  CHECK(only_node[std::size_t(b[8].index)] == a[12].value);
  CHECK(only_node[std::size_t(later.index)] == 0);
  CHECK(tape.gradient(other)[std::size_t(a[1].index)] == 7 * b[1].value);

  const Var<double> square = dot(a.data(), 3, a.data(), 3, n);  // both factors the same variable
  CHECK(tape.gradient(square)[std::size_t(a[3].index)] == 2 * a[3].value);
}

TEST_CASE("a dot product takes plain numbers, constants and no terms at all") {
  const std::vector<double> w = {2, 3, 5};
  Tape<double> tape;
  std::vector<Var<double>> x = {tape.variable(1), tape.variable(10), tape.variable(100)};
  const auto plain = [&](Index i) { return w[std::size_t(i)]; };
  const auto variable = [&](Index i) { return x[std::size_t(i)]; };
  const Index before = tape.size();
  const Var<double> y = math::dot_product(3, plain, variable);
  CHECK(tape.size() == before + 1);
  CHECK(y.value == 532);
  CHECK(tape.gradient(y)[1] == 3);
  CHECK(math::dot_product(3, plain, plain) == 38);
  CHECK(math::dot_product(0, plain, plain) == 0);
  CHECK(math::dot_product(0, variable, plain).is_constant());
  const auto constants = [&](Index i) { return Var<double>(w[std::size_t(i)]); };
  const Var<double> folded = math::dot_product(3, constants, plain);
  CHECK(folded.is_constant());
  CHECK(folded.value == 38);
  CHECK(tape.gradient(folded) == std::vector<double>(std::size_t(tape.size()), 0.0));
}

TEST_CASE("attention over 130 tokens of width 64 on two heads stays below 100 MB of tape") {
  const Index heads = 2, len = 130, dim = 64;
  Tape<double> tape;
  std::vector<Var<double>> q, k, v;
  for (auto* tensor : {&q, &k, &v})
    for (const double x : random_values(heads * len * dim, 5)) tensor->push_back(tape.variable(x));
  Var<double> loss = 0;
  std::vector<Var<double>> weight(std::size_t(len), 0.0);
  for (Index h = 0; h < heads; ++h)
    for (Index i = 0; i < len; ++i) {
      Var<double> sum = 0;
      for (Index j = 0; j < len; ++j) {
        const Var<double> score = 0.125 * dot(&q[std::size_t((h * len + i) * dim)], 1,
                                              &k[std::size_t((h * len + j) * dim)], 1, dim);
        sum += weight[std::size_t(j)] = math::exp(score);
      }
      for (Index c = 0; c < dim; ++c)
        loss += dot(weight.data(), 1, &v[std::size_t(h * len * dim + c)], dim, len) / sum;
    }
  CHECK(tape.bytes() < 100'000'000);
  const std::vector<double> adjoint = tape.gradient(loss);
  double total = 0;  // the weights of a row sum to 1, and the loss adds every entry of every row
  for (const Var<double>& x : v) total += adjoint[std::size_t(x.index)];
  CHECK(total == Approx(double(heads * len * dim)).epsilon(1e-12));
  double shift = 0;  // adding a constant vector to all keys of a head changes no weight
  for (Index j = 0; j < len; ++j) shift += adjoint[std::size_t(k[std::size_t(j * dim)].index)];
  CHECK(std::abs(shift) < 1e-9);
}

TEST_CASE("mixing two tapes is refused, and a cleared tape starts anew") {
  Tape<double> one, two;
  const Var<double> x = one.variable(1), y = two.variable(2);
  CHECK_THROWS_AS(x * y, std::invalid_argument);
  CHECK_THROWS_AS(one.gradient(y), std::invalid_argument);
  CHECK_THROWS_AS(dot(&x, 0, &y, 0, 1), std::invalid_argument);
  two.clear();
  CHECK(two.size() == 0);
  CHECK(two.bytes() == 0);
  const Var<double> z = two.variable(3);
  CHECK(two.gradient(z * z) == std::vector<double>{6, 1});
}

TEST_CASE("a Dual of Duals gives second derivatives, a Dual of Vars Hessian times vector") {
  using Second = Dual<Dual1, 1>;
  const auto f = [](auto x) { return math::sigmoid(x) * math::exp(x) + math::tanh(x) / x; };
  const auto slope = [&](long double x) { return (f(x + 1e-5L) - f(x - 1e-5L)) / 2e-5L; };
  for (const double x : {-1.5, 0.4, 2.0}) {
    CAPTURE(x);
    const Second y = f(Second::variable(Dual1::variable(x)));
    const double expected = double((slope(x + 1e-4L) - slope(x - 1e-4L)) / 2e-4L);
    CHECK(y.grad[0].grad[0] == Approx(expected).epsilon(1e-7));
    CHECK(y.value.grad[0] == y.grad[0].value);
    Tape<double> tape;
    const Var<double> v = tape.variable(x);
    const auto mixed = f(Dual<Var<double>, 1>::variable(v));
    CHECK(tape.gradient(mixed.grad[0])[std::size_t(v.index)] ==
          Approx(y.grad[0].grad[0]).epsilon(1e-13));
  }
}

namespace {

// One formula with all words that a score may use, for scalars and lanes alike.
template <class S>
S score(const S& x, const S& y) {
  const S bounded = math::tanh(S(x * y)) + 0.5 * math::sigmoid(S(x - y)) / (y * y + 1);
  const S larger = math::maximum(x, y) * math::absolute(y) - math::log(S(y * y + 2));
  return bounded * larger + math::exp(x) / math::sqrt(S(x * x + 1)) - (3 - x);
}

template <class Lanes, class Lane>
void require_lanes_match(int width, double bound, const Lane& lane) {
  using D = Dual<Lanes, 2>;
  Lanes x{}, y{};
  std::vector<double> xs = random_values(width, 6), ys = random_values(width, 7);
  const auto set = [](Lanes& lanes, int i, double value) {
    if constexpr (requires { lanes.v[i]; })
      lanes.v[i] = static_cast<std::remove_cvref_t<decltype(lanes.lane(i))>>(value);
    else
      lanes[i] = value;
  };
  for (int i = 0; i < width; ++i) {
    set(x, i, xs[std::size_t(i)]);
    set(y, i, ys[std::size_t(i)]);
  }
  const D packed = score(D::variable(x, 0), D::variable(y, 1));
  for (int i = 0; i < width; ++i) {
    CAPTURE(i, width);
    const auto expected = score(Dual<double, 2>::variable(double(lane(x, i)), 0),
                                Dual<double, 2>::variable(double(lane(y, i)), 1));
    CHECK(std::abs(double(lane(packed.value, i)) - expected.value) < bound);
    CHECK(std::abs(double(lane(packed.grad[0], i)) - expected.grad[0]) < bound);
    CHECK(std::abs(double(lane(packed.grad[1], i)) - expected.grad[1]) < bound);
  }
}

}  // namespace

TEST_CASE("a Dual of SIMD lanes computes in each lane what the scalar Dual computes") {
  require_lanes_match<TwoDoubles>(2, 1e-14, [](const TwoDoubles& v, int i) { return v[i]; });
  require_lanes_match<heed::Pack<double>>(heed::Pack<double>::width, 1e-13,
                                          [](heed::Pack<double> v, int i) { return v.lane(i); });
  require_lanes_match<heed::Pack<float>>(heed::Pack<float>::width, 1e-4,
                                         [](heed::Pack<float> v, int i) { return v.lane(i); });
}
