// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fast results against the reference, by the rules of tolerances.hpp.

#include "catch.hpp"
#include "conformance/runner.hpp"
#include "tolerances.hpp"

namespace heed_test {

// Length pairs: 0, 1, primes, and one more and one less than tiles of 8, 16, 64 and 96 tokens.
inline constexpr Index kLengths[][2] = {
    {0, 0},   {0, 5},   {5, 0},   {1, 1},   {1, 2},   {2, 1},   {1, 17},  {17, 1},  {2, 3},
    {3, 7},   {7, 7},   {7, 8},   {8, 7},   {8, 8},   {8, 9},   {9, 8},   {9, 9},   {11, 13},
    {13, 11}, {15, 16}, {16, 15}, {16, 16}, {16, 17}, {17, 16}, {17, 17}, {19, 31}, {31, 32},
    {32, 31}, {32, 33}, {33, 32}, {33, 33}, {37, 5},  {5, 37},  {47, 48}, {48, 49}, {1, 63},
    {1, 64},  {1, 65},  {63, 1},  {65, 1},  {63, 65}, {64, 64}, {65, 63}, {1, 97},  {3, 127},
    {96, 95}, {95, 97}, {97, 96}, {2, 191},
};
inline constexpr Index kDims[] = {1, 2, 3, 8, 16, 33, 64, 80, 128};

template <class T>
void note_rows(Distance& distance, const std::vector<T>& fast, const std::vector<double>& slow,
               const Twin& twin, Index dim) {
  REQUIRE(fast.size() == slow.size());
  for (std::size_t n = 0; n < fast.size(); ++n)
    distance.note(
        n, double(fast[n]), slow[n],
        tolerance::forward<T>(twin.s_row[n / std::size_t(dim)], twin.weighted_abs_value[n]));
}

// The largest finite distance between two lists.
[[nodiscard]] inline double largest_error(const std::vector<double>& a,
                                          const std::vector<double>& exact) {
  REQUIRE(a.size() == exact.size());
  double error = 0;
  for (std::size_t n = 0; n < exact.size(); ++n)
    if (std::isfinite(a[n] - exact[n])) error = std::max(error, std::abs(a[n] - exact[n]));
  return error;
}

// Compares the largest error with that of the naive loop in float. `size` is the factor in the rule; if the naive loop's
// own error does not suffice, `nearby_error()` gives its error for inputs close by.
template <class Nearby>
void check_beside_naive(const std::vector<double>& fast, const std::vector<double>& naive,
                        const std::vector<double>& exact, const char* what,
                        double (*rule)(double, double), double size, Nearby&& nearby_error) {
  REQUIRE(fast.size() == exact.size());
  const auto distance_by = [&](double naive_error) {
    Distance distance;
    for (std::size_t n = 0; n < exact.size(); ++n)
      distance.note(n, fast[n], exact[n], rule(naive_error, size));
    return distance;
  };
  double naive_error = largest_error(naive, exact);
  Distance distance = distance_by(naive_error);
  if (!distance.within()) {
    naive_error = std::max(naive_error, nearby_error());
    distance = distance_by(naive_error);
  }
  INFO(what << ": " << distance.text() << "; the naive loop is off by " << naive_error);
  CHECK(distance.within());
}
inline void check_beside_naive(const std::vector<double>& fast, const std::vector<double>& naive,
                               const std::vector<double>& exact, const char* what,
                               double (*rule)(double, double), double size) {
  check_beside_naive(fast, naive, exact, what, rule, size, [] { return 0.0; });
}

template <class T>
[[nodiscard]] double largest_row(const Tensor<T>& x) {
  const std::vector<double> numbers = x.template dense<double>();
  double top = 0, squares = 0;
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    squares = n % std::size_t(x.shape().dim) == 0 ? 0 : squares;
    squares += numbers[n] * numbers[n];
    top = std::max(top, squares);
  }
  return std::sqrt(top);
}

// See tolerance::sum_of_terms.
template <class T>
[[nodiscard]] double size_of_terms(const Runner<T>& runner, const Call<T>& call) {
  const double rows = double(call.geometry.query_rows());
  const double keys = runner.linear_rows ? double(call.geometry.len_kv) : 1.0;  // softmax: sum 1
  return largest_row(call.grad_out) * largest_row(call.value) * std::sqrt(rows * keys);
}

// The results with which forward is compared. Needs twin, and in float naive.
struct Twins {
  Twin exact, naive;
};
template <class T>
[[nodiscard]] Twins run_twins(const Runner<T>& runner, const Call<T>& call) {
  return {runner.twin(call), sizeof(T) == sizeof(float) ? runner.naive(call) : Twin{}};
}

template <class T>
void check_lse(const Runner<T>& runner, const Call<T>& call, const Outcome<T>& result,
               const Twin& twin) {
  Distance lse;
  const std::size_t rows = std::size_t(call.geometry.query_rows());
  REQUIRE(result.saved.lse.size() == rows * std::size_t(runner.maps));
  for (std::size_t n = 0; n < result.saved.lse.size(); ++n) {
    const double wanted = twin.lse[n / rows][n % rows];
    if (!runner.lse_of_scores && std::isfinite(result.saved.lse[n]) && std::isfinite(wanted))
      continue;
    lse.note(n, double(result.saved.lse[n]), wanted,
             tolerance::lse<T>(twin.s_row[n % rows], wanted));
  }
  INFO("lse: " << lse.text());
  CHECK(lse.within());
}

// Compares out, mixed rows and lse with the references.
template <class T>
Outcome<T> check_forward(const Runner<T>& runner, const Call<T>& call, const Twins& twins,
                         Layout layout = Layout::dense) {
  INFO(runner.name << " in " << (sizeof(T) == 4 ? "float" : "double") << ", "
                   << describe(call.geometry));
  const Twin& twin = twins.exact;
  const Outcome<T> result = forward(runner, call, layout);
  CHECK(result.out.untouched());
  const std::vector<double> out = result.out.template dense<double>();

  Distance mixed;
  const bool saved = !result.saved.mixed.empty();
  if (saved) note_rows(mixed, result.saved.mixed, twin.mixed, twin, call.geometry.dim_v);
  if (runner.plain_rows) note_rows(mixed, result.out.dense(), twin.out, twin, call.geometry.dim_v);
  INFO("mixed: " << mixed.text());
  CHECK(mixed.within());

  if constexpr (sizeof(T) == sizeof(float)) {
    check_beside_naive(out, twins.naive.out, twin.out, "out", tolerance::forward_beside_naive,
                       largest(twin.out));
  } else {
    Distance distance;
    const double allowed = tolerance::relative_to_largest(largest(twin.out));
    REQUIRE(out.size() == twin.out.size());
    for (std::size_t n = 0; n < out.size(); ++n) distance.note(n, out[n], twin.out[n], allowed);
    INFO("out: " << distance.text());
    CHECK((runner.plain_rows || distance.within()));
  }
  check_lse(runner, call, result, twin);
  return result;
}
template <class T>
Outcome<T> check_forward(const Runner<T>& runner, const Call<T>& call,
                         Layout layout = Layout::dense) {
  return check_forward(runner, call, run_twins(runner, call), layout);
}

// Runs with the tiles of the plan, and with small ones.
template <class T>
void check_forward_in_tiles(const Runner<T>& runner, Call<T> call) {
  const Twins twins = run_twins(runner, call);
  check_forward(runner, call, twins);
  const std::optional<double> scale = call.options.scale;
  call.options = small_tiles();
  call.options.scale = scale;
  check_forward(runner, call, twins);
}

// The naive loop's largest error in gradient `t` over inputs that lie a rounding away from the
// call's. The error of one draw is random if a few pairs make nearly all of it: a converged gate at
// its steepest turns an ulp of a cosine into hundreds of ulps of its slope, or into none.
template <class T>
[[nodiscard]] double naive_error_nearby(const Runner<T>& runner, const Call<T>& call,
                                        std::size_t t) {
  constexpr std::uint64_t kDraws = 8;
  double error = 0;
  for (std::uint64_t draw = 1; draw <= kDraws; ++draw) {
    Call<T> near = call;
    near.query.nudge(2 * draw);
    near.key.nudge(2 * draw + 1);
    error = std::max(error,
                     largest_error(runner.naive_tape(near)[t].values, runner.tape(near)[t].values));
  }
  return error;
}

// Compares every gradient with the tape. Needs backward, tape, and in float naive_tape.
template <class T>
Named check_backward(const Runner<T>& runner, const Call<T>& call, Layout layout = Layout::dense) {
  INFO(runner.name << " in " << (sizeof(T) == 4 ? "float" : "double") << ", "
                   << describe(call.geometry));
  const Outcome<T> result = forward(runner, call, layout);
  const Named fast = backward(runner, call, result, layout);
  const Named exact = runner.tape(call);
  REQUIRE(fast.size() == exact.size());
  Named naive;
  if constexpr (sizeof(T) == sizeof(float)) naive = runner.naive_tape(call);
  for (std::size_t t = 0; t < fast.size(); ++t) {
    INFO("gradient of " << exact[t].name);
    REQUIRE(fast[t].name == exact[t].name);
    REQUIRE(fast[t].values.size() == exact[t].values.size());
    if constexpr (sizeof(T) == sizeof(float)) {
      const std::vector<double>& slow = exact[t].values;
      const bool parameter = slow.size() <= std::size_t(call.geometry.heads);
      if (parameter || call.geometry.len_kv == 1)
        check_beside_naive(fast[t].values, naive[t].values, slow, "gradient",
                           tolerance::sum_of_terms,
                           std::max(largest(slow), size_of_terms(runner, call)));
      else
        check_beside_naive(fast[t].values, naive[t].values, slow, "gradient",
                           tolerance::backward_beside_naive, largest(slow),
                           [&] { return naive_error_nearby(runner, call, t); });
    } else {
      Distance distance;
      const double allowed = tolerance::exact_gradient(largest(exact[t].values));
      for (std::size_t n = 0; n < fast[t].values.size(); ++n)
        distance.note(n, fast[t].values[n], exact[t].values[n], allowed);
      INFO(distance.text());
      CHECK(distance.within());
    }
  }
  return fast;
}

}  // namespace heed_test
