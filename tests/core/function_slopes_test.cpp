// SPDX-License-Identifier: Apache-2.0
// The functions of core/functions.hpp on numbers that carry derivatives, and at the ends of their domains.
#include <heed/autodiff/complex_step.hpp>
#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/lane_dual.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/core/functions.hpp>
#include <heed/simd/functions.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

namespace math = heed::math;
using heed::Dual;
using heed::LaneDual;
using heed::Pack;
using heed::Tape;
using heed::Var;
using Complex = std::complex<double>;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The value of f(x, y) and its slopes in x and y.
struct Slopes {
  double value, x, y;
};

template <class F>
[[nodiscard]] Slopes by_dual(const F& f, double x, double y) {
  using D = Dual<double, 2>;
  const D z = f(D::variable(x, 0), D::variable(y, 1));
  return {z.value, z.grad[0], z.grad[1]};
}
template <class F>
[[nodiscard]] Slopes by_lane_dual(const F& f, double x, double y) {
  using D = LaneDual<double, 2>;
  const D z = f(D::template variable<0>(x), D::template variable<1>(y));
  return {z.value, z.moves[0] ? z.grad[0] : 0, z.moves[1] ? z.grad[1] : 0};
}
// The last lane of a pack whose other lanes hold other numbers.
template <class Real, class F>
[[nodiscard]] Slopes by_lanes(const F& f, double x, double y) {
  using P = Pack<Real>;
  using D = LaneDual<P, 2>;
  constexpr int last = P::width - 1;
  P px = Real(0.5), py = Real(0.25);
  px.v[last] = Real(x), py.v[last] = Real(y);
  const D z = f(D::template variable<0>(px), D::template variable<1>(py));
  return {double(z.value.lane(last)), z.moves[0] ? double(z.grad[0].lane(last)) : 0,
          z.moves[1] ? double(z.grad[1].lane(last)) : 0};
}
template <class F>
[[nodiscard]] Slopes by_tape(const F& f, double x, double y) {
  Tape<double> tape;
  const Var<double> vx = tape.variable(x), vy = tape.variable(y), z = f(vx, vy);
  const std::vector<double> adjoint = tape.gradient(z);
  return {z.value, adjoint[std::size_t(vx.index)], adjoint[std::size_t(vy.index)]};
}
template <class F>
[[nodiscard]] Slopes by_complex_step(const F& f, double x, double y) {
  const double h = 1e-30;
  const Complex along_x = f(Complex(x, h), Complex(y)), along_y = f(Complex(x), Complex(y, h));
  return {along_x.real(), along_x.imag() / h, along_y.imag() / h};
}

// Calls visit(name, slopes, roundings) for every type of number; roundings: 1 for double, more for float.
template <class F, class Visit>
void for_each_scalar(const F& f, double x, double y, const Visit& visit) {
  visit("Dual", by_dual(f, x, y), 1.0);
  visit("LaneDual", by_lane_dual(f, x, y), 1.0);
  visit("Var", by_tape(f, x, y), 1.0);
  visit("complex", by_complex_step(f, x, y), 1.0);
  visit("LaneDual of Pack<double>", by_lanes<double>(f, x, y), 4.0);
  visit("LaneDual of Pack<float>", by_lanes<float>(f, x, y), std::ldexp(1.0, 29));
}

// Five points in long double, h = 1e-5: rounding about 1e-14, truncation h^4 / 30 times f's fifth derivative.
template <class F>
[[nodiscard]] double by_difference(const F& f, double x) {
  const long double h = 1e-5L, centre = x;
  const long double inner = f(centre + h) - f(centre - h);
  const long double outer = f(centre + 2 * h) - f(centre - 2 * h);
  return double((8 * inner - outer) / (12 * h));
}

// Compares the derivatives of f with difference quotients, and its value with that of f on plain numbers.
template <class F>
void require_slopes(const F& f, const std::vector<std::pair<double, double>>& points) {
  for (const auto& [x, y] : points) {
    const double at_x = x, at_y = y;
    const double slope_x =
        by_difference([&](long double v) { return f(v, (long double)(at_y)); }, x);
    const double slope_y =
        by_difference([&](long double v) { return f((long double)(at_x), v); }, y);
    const double value = f(x, y);
    for_each_scalar(f, x, y, [&](const char* name, const Slopes& got, double roundings) {
      CAPTURE(name, at_x, at_y);
      const double eps = 2e-15 * roundings, quotient = std::max(1e-11, eps);
      CHECK(std::abs(got.value - value) <= eps * std::max(1.0, std::abs(value)));
      CHECK(std::abs(got.x - slope_x) <= quotient * std::max(1.0, std::abs(slope_x)));
      CHECK(std::abs(got.y - slope_y) <= quotient * std::max(1.0, std::abs(slope_y)));
    });
  }
}

// A function of x alone and one of y alone, as functions of both.
template <class F>
[[nodiscard]] auto of_one(const F& f) {
  return [f](auto x, auto) { return f(x); };
}

// Every type of number has these slopes of f at (x, y), within 8 roundings. Dual and the complex step multiply an infinite
// slope by a change of 0, which is NaN (autodiff/dual.hpp): they are asked where both slopes are finite.
template <class F>
void require_at(const F& f, double x, double y, double slope_x, double slope_y) {
  const auto agrees = [](double got, double wanted, double roundings) {
    if (std::isnan(wanted)) return std::isnan(got);
    return got == wanted || std::abs(got - wanted) <= 2e-15 * roundings * std::abs(wanted);
  };
  for_each_scalar(f, x, y, [&](const char* name, const Slopes& got, double roundings) {
    CAPTURE(name, x, y, got.x, got.y);
    const std::string_view kind(name);
    if ((kind == "Dual" || kind == "complex") && !std::isfinite(slope_x + slope_y)) return;
    CHECK(agrees(got.x, slope_x, roundings));
    CHECK(agrees(got.y, slope_y, roundings));
  });
}

const auto power = [](auto x, auto y) { return math::pow(x, y); };

}  // namespace

TEST_CASE("every function has the slope of its long double difference quotient", "[functions]") {
  const std::vector<std::pair<double, double>> line = {{-5.25, 0}, {-1, 0}, {-0.3, 0}, {1e-3, 0},
                                                       {0.5, 0},   {1, 0},  {2.75, 0}, {7, 0}};
  const std::vector<std::pair<double, double>> inside = {{-0.7, 0}, {-0.25, 0}, {1e-3, 0},
                                                         {0.5, 0},  {3, 0},     {40, 0}};
  require_slopes(of_one([](auto x) { return math::sin(x); }), line);
  require_slopes(of_one([](auto x) { return math::cos(x); }), line);
  require_slopes(of_one([](auto x) { return math::erf(x); }), line);
  require_slopes(of_one([](auto x) { return math::expm1(x); }), line);
  require_slopes(of_one([](auto x) { return math::softplus(x); }), line);
  require_slopes(of_one([](auto x) { return math::log1p(x); }), inside);
  require_slopes(of_one([](auto x) { return math::pow(x, 2.5); }), {{0.25, 0}, {1, 0}, {3, 0}});
  require_slopes(of_one([](auto x) { return math::pow(x, 3); }), {{-2, 0}, {0.5, 0}, {1.5, 0}});
  require_slopes(of_one([](auto x) { return math::pow(0.25F, x); }), line);
  require_slopes(power, {{0.25, 1.5}, {1, -2}, {2.5, 0.25}, {3, 3}, {0.5, -0.75}});
  require_slopes([](auto x, auto y) { return math::minimum(x, y); }, {{1, 2}, {2, 1}, {-3, 0.5}});
}

TEST_CASE("pow has slopes at base 0 and exponent 0, the limits of those beside", "[functions]") {
  require_at(power, 0, 0, 0, 0);       // 0^y jumps from 1 to 0: no slope, and no NaN
  require_at(power, 0, 1, 1, 0);       // x
  require_at(power, 0, 2, 0, 0);       // x^2
  require_at(power, 0, 0.5, kInf, 0);  // sqrt(x)
  require_at(power, 3, 0, 0, std::log(3.0));
  require_at(power, -2, 3, 12, kNan);  // a negative base has whole exponents only
  require_at(power, -2, 0, 0, kNan);
  require_at(power, kInf, -1, 0, 0);
  const auto constant_exponent = [](auto c) {
    return of_one([c](auto x) { return math::pow(x, c); });
  };
  require_at(constant_exponent(0), 0, 0, 0, 0);
  require_at(constant_exponent(1), 0, 0, 1, 0);
  require_at(constant_exponent(2.0), -3, 0, -6, 0);
  require_at(constant_exponent(2.0F), 0, 0, 0, 0);
  const auto constant_base = [](auto c) { return of_one([c](auto x) { return math::pow(c, x); }); };
  require_at(constant_base(0.0), 2, 0, 0, 0);
  require_at(constant_base(0), 0, 0, 0, 0);
  require_at(constant_base(2), 3, 0, 8 * std::log(2.0), 0);
  CHECK(std::signbit(math::pow(Dual<double, 1>(-0.0), Dual<double, 1>(3)).value));
}

TEST_CASE("slopes keep their digits far from 0 and at the ends of domains", "[functions]") {
  const auto soft = of_one([](auto x) { return math::softplus(x); });
  require_at(soft, 80, 0, 1, 0);
  require_at(soft, -30, 0, std::exp(-30.0) / (1 + std::exp(-30.0)), 0);
  CHECK(by_dual(soft, 1e30, 0).x == 1);
  CHECK(by_dual(soft, -1e30, 0).x == 0);
  CHECK(by_dual(soft, 1e30, 0).value == 1e30);
  CHECK(by_tape(soft, -700, 0).x == Approx(std::exp(-700.0)).epsilon(1e-14));
  require_at(of_one([](auto x) { return math::expm1(x); }), -60, 0, std::exp(-60.0), 0);
  require_at(of_one([](auto x) { return math::log1p(x); }), -1, 0, kInf, 0);
  require_at(of_one([](auto x) { return math::log1p(x); }), 1e20, 0, 1e-20, 0);
  require_at(of_one([](auto x) { return math::erf(x); }), 30, 0, 0, 0);
  require_at(of_one([](auto x) { return math::erf(x); }), 0, 0, 2 / std::sqrt(std::acos(-1.0)), 0);
  const auto sine = of_one([](auto x) { return math::sin(x); });
  require_at(sine, 1e6, 0, std::cos(1e6), 0);
  CHECK(std::isnan(by_dual(sine, kInf, 0).x));
  CHECK(std::isnan(by_dual(soft, kNan, 0).value));
}

TEST_CASE("the slope of erf is right within x^2 + 4 ulp", "[functions]") {
  const auto f = of_one([](auto x) { return math::erf(x); });
  const auto worst = [&](const auto& slopes, double eps) {
    double most = 0;
    for (int i = -800; i <= 800; ++i) {
      const float x = float(i) / 160.0F;
      const long double square = (long double)(x)*x;
      const long double wanted = 2 / std::sqrt(std::acos(-1.0L)) * std::exp(-square);
      const double error = double(std::abs(slopes(f, double(x), 0.0).x / wanted - 1)) / eps;
      most = std::max(most, error / double(square + 4));
    }
    return most;
  };
  const auto dual = [](const auto& g, double x, double y) { return by_dual(g, x, y); };
  const auto wide = [](const auto& g, double x, double y) { return by_lanes<double>(g, x, y); };
  const auto narrow = [](const auto& g, double x, double y) { return by_lanes<float>(g, x, y); };
  CHECK(worst(dual, std::numeric_limits<double>::epsilon()) < 1);
  CHECK(worst(wide, std::numeric_limits<double>::epsilon()) < 1);
  CHECK(worst(narrow, double(std::numeric_limits<float>::epsilon())) < 1);
}

TEST_CASE("softplus of plain numbers is right within 3 ulp", "[functions]") {
  for (int i = -30000; i <= 30000; ++i) {
    const double x = i / 800.0;
    const long double wanted =
        std::log1p(std::exp(-std::abs((long double)(x)))) + std::max((long double)(x), 0.0L);
    if (!(std::abs(math::softplus(x) - wanted) <=
          3 * std::numeric_limits<double>::epsilon() / 2 * wanted))
      CHECK(x == wanted);
  }
}

TEST_CASE("tanh and sigmoid are flat where they are saturated, in lanes too", "[functions]") {
  const auto tangent = of_one([](auto x) { return math::tanh(x); });
  const auto gate = of_one([](auto x) { return math::sigmoid(x); });
  for (const double x : {60.0, -60.0, 1e30, -1e30}) {
    for_each_scalar(tangent, x, 0, [&](const char* name, const Slopes& got, double) {
      if (std::string_view(name) == "complex") return;  // std::tanh of a complex number
      CAPTURE(name, x);
      CHECK(got.value == (x < 0 ? -1 : 1));
      CHECK(std::abs(got.x) <= 1e-50);
    });
    for_each_scalar(gate, x, 0, [&](const char* name, const Slopes& got, double) {
      if (std::string_view(name) == "complex") return;
      CAPTURE(name, x);
      CHECK(std::abs(got.value - (x < 0 ? 0 : 1)) < 1e-25);
      CHECK(std::abs(got.x) <= 1e-25);
    });
  }
}

TEST_CASE("second derivatives go through every function", "[functions]") {
  using Second = Dual<Dual<double, 1>, 1>;
  const auto f = [](auto x) {
    using S = decltype(x);
    return math::sin(x) * math::erf(x) + math::log1p(S(x * x)) * math::cos(x) +
           math::softplus(x) * math::expm1(x) + math::pow(S(x * x + 1.0), S(x * 0.5)) +
           math::pow(S(x + 3.0), 1.5) + math::pow(2.0, x);
  };
  for (const double x : {-1.5, 0.4, 2.0}) {
    CAPTURE(x);
    const auto slope = [&](double at) { return f(Dual<double, 1>::variable(at)).grad[0]; };
    const double expected = (slope(x + 1e-5) - slope(x - 1e-5)) / 2e-5;
    const Second y = f(Second::variable(Dual<double, 1>::variable(x)));
    CHECK(y.grad[0].grad[0] == Approx(expected).epsilon(1e-7));
  }
}

TEST_CASE("the side that minimum does not take leaves no trace", "[functions]") {
  CHECK(math::minimum(1.0, 2.0) == 1);
  CHECK(math::minimum(2.0F, 1.0F) == 1);
  CHECK(std::isnan(math::minimum(kNan, 1.0)));
  CHECK(std::isnan(math::minimum(1.0, kNan)));
  Tape<double> tape;
  const Var<double> a = tape.variable(1), b = tape.variable(1);
  CHECK(math::minimum(a, b).index == a.index);
}
