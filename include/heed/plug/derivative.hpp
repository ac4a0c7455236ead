// SPDX-License-Identifier: Apache-2.0
#pragma once

// The derivative of a score: its own score_vjp, or, without one, score() on dual numbers. A user's
// score without a derivative thus still gets a fused backward in O(len) memory. Whoever writes one includes
// autodiff/lane_dual.hpp, which has these numbers, or plug/own_score.hpp, which brings it.

#include <heed/plug/score.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class S, int Count>
struct LaneDual;

template <class Score, class S>
concept HasScoreVjp = requires(const Score& score, const PairOf<Score, S>& pair,
                               const ScalarsOf<Score, S>& p, S g, PairOf<Score, S>& d,
                               ScalarsOf<Score, S>& dp) {
  score.score_vjp(pair, p, g, d, dp);
};

namespace detail {

// Is autodiff/lane_dual.hpp included?
template <class S>
inline constexpr bool knows_lane_duals = requires {
  sizeof(LaneDual<S, 1>);
};

// The slope of summand(x) of a score that sums its inputs.
template <class Score, class S>
[[nodiscard]] S slope_of_summand(const Score& score, const S& x) {
  const auto y = score.summand(LaneDual<S, 1>::template variable<0>(x));
  return y.moves[0] ? y.grad[0] : S(0);
}

// Calls f(n, value) for every differentiable field that pairs of this score have, in one pair, or
// in several at once; the constant n = 0, 1, ... is the field's direction.
template <class Score>
struct Directions {
  static constexpr int projected = 2, table = projected + Score::has_projection,
                       position = table + Score::has_table, query = position + Score::has_positions,
                       key = query + Score::query_features, scalars = key + Score::key_features,
                       count = scalars + scalars_of<Score>;
  template <int n>
  using At = std::integral_constant<int, n>;

  template <class F, class... Pairs>
  [[gnu::always_inline]] static void for_each_field(F&& f, Pairs&... pairs) {
    f(At<0>{}, pairs.dot...);
    f(At<1>{}, pairs.logit...);
    if constexpr (Score::has_projection) f(At<projected>{}, pairs.projected...);
    if constexpr (Score::has_table) f(At<table>{}, pairs.table...);
    if constexpr (Score::has_positions) f(At<position>{}, pairs.position...);
    for_directions<Score::query_features>([&](auto i) { f(At<query + i>{}, pairs.query[i]...); });
    for_directions<Score::key_features>([&](auto i) { f(At<key + i>{}, pairs.key[i]...); });
  }
};

template <class Score, class Form, class S>
[[gnu::always_inline]] inline void differentiate_by_duals(const Form& form,
                                                          const PairOf<Score, S>& pair,
                                                          const ScalarsOf<Score, S>& p, S g,
                                                          PairOf<Score, S>& d,
                                                          ScalarsOf<Score, S>& dp) {
  using At = Directions<Score>;
  using D = LaneDual<S, At::count>;
  PairOf<Score, D> lifted;
  At::for_each_field([](auto n, D& to, const S& from) { to = D::template variable<n>(from); },
                     lifted, pair);
  lifted.query_index = D(pair.query_index);
  lifted.key_index = D(pair.key_index);
  ScalarsOf<Score, D> scalars;
  for_directions<scalars_of<Score>>(
      [&](auto i) { scalars[i] = D::template variable<At::scalars + i>(p[i]); });
  const D result = form.score(lifted, scalars);
  At::for_each_field(
      [&](auto n, S& to) {
        if (result.moves[n]) to = g * result.grad[n];
      },
      d);
  for_directions<scalars_of<Score>>([&](auto i) {
    constexpr int n = At::scalars + i;
    if (result.moves[n]) dp[i] += g * result.grad[n];
  });
}

}  // namespace detail

template <class Form>
concept GathersSums = Form::gathers_sums;

// The type by which a loop holds a form: a small form by value, in registers; a score with parameters by reference.
template <class Form>
using HeldForm = std::conditional_t<std::is_trivially_copyable_v<Form>, const Form, const Form&>;

// Sets d.<field> = g * dscore/dfield, and adds to dp[i] g * dscore/dp[i]. `d` must be zero before.
template <class Score, class Form, class S>
[[gnu::always_inline]] inline void differentiate_score(const Form& form,
                                                       const PairOf<Score, S>& pair,
                                                       const ScalarsOf<Score, S>& p, S g,
                                                       PairOf<Score, S>& d,
                                                       ScalarsOf<Score, S>& dp) {
  if constexpr (HasScoreVjp<Score, S>)
    form.score_vjp(pair, p, g, d, dp);
  else
    detail::differentiate_by_duals<Score>(form, pair, p, g, d, dp);
}

}  // namespace HEED_ABI
}  // namespace heed
