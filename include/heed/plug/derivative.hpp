// SPDX-License-Identifier: Apache-2.0
#pragma once

// The derivative of a score: its own score_vjp, or, where it has none, dual numbers run through score().
// A user's score without a derivative thus still gets a fused backward in O(len) memory.

#include <heed/autodiff/dual.hpp>
#include <heed/plug/score.hpp>

#include <tuple>
#include <type_traits>

namespace heed::inline HEED_ABI {

template <class Score, class S>
concept HasScoreVjp = requires(const Score& score, const PairOf<Score, S>& pair,
                               const ScalarsOf<Score, S>& p, S g, PairOf<Score, S>& d,
                               ScalarsOf<Score, S>& dp) { score.score_vjp(pair, p, g, d, dp); };

namespace detail {

// Calls f(value) for every differentiable field of one or more pairs side by side, in a fixed order.
template <class F, class... Pairs>
void for_each_field(F&& f, Pairs&... pairs) {
  f(pairs.dot...);
  f(pairs.logit...);
  f(pairs.projected...);
  f(pairs.table...);
  const std::size_t queries = std::get<0>(std::tie(pairs...)).query.size();
  const std::size_t keys = std::get<0>(std::tie(pairs...)).key.size();
  for (std::size_t i = 0; i < queries; ++i) f(pairs.query[i]...);
  for (std::size_t i = 0; i < keys; ++i) f(pairs.key[i]...);
}

template <class Score, class S>
void differentiate_by_duals(const Score& score, const PairOf<Score, S>& pair,
                            const ScalarsOf<Score, S>& p, S g, PairOf<Score, S>& d,
                            ScalarsOf<Score, S>& dp) {
  constexpr int inputs = 4 + Score::query_features + Score::key_features + Score::scalars;
  using D = Dual<S, inputs>;
  PairOf<Score, D> lifted;
  int next = 0;
  for_each_field([&](D& to, const S& from) { to = D::variable(from, next++); }, lifted, pair);
  lifted.query_index = D(pair.query_index);
  lifted.key_index = D(pair.key_index);
  ScalarsOf<Score, D> scalars;
  for (std::size_t i = 0; i < scalars.size(); ++i) scalars[i] = D::variable(p[i], next++);
  const D result = score.score(lifted, scalars);
  std::size_t read = 0;
  for_each_field([&](S& to) { to = g * result.grad[read++]; }, d);
  for (std::size_t i = 0; i < dp.size(); ++i) dp[i] += g * result.grad[read++];
}

}  // namespace detail

// f(form) once, where `form` has score() and, if the score has one, score_vjp(): the score itself, or the
// form of it that its options ask for. A score with with_form() lets the engine compile one loop for each
// form, without a branch inside.
template <class Score, class F>
void with_score_form(const Score& score, F&& f) {
  if constexpr (requires { score.with_form(f); })
    score.with_form(f);
  else
    f(score);
}

// A form may add up its query's side over the keys by itself, where that takes fewer numbers per pair:
//
//   static constexpr int lane_sums         numbers that it adds up per query
//   static constexpr int key_gradients     leading key features that have a gradient; the others have none
//   score_vjp(pair, p, g, d, sums)         adds to sums[0..lane_sums); of `d` sets dot, logit and key
//   finish(sums, query, p, dquery, dp)     gradients of the query's features and of p, from the sums
template <class Form>
concept GathersSums = requires {
  { Form::lane_sums } -> std::convertible_to<int>;
  { Form::key_gradients } -> std::convertible_to<int>;
};

// How a loop holds a form: a small one by value, in registers; a score with parameters by reference.
template <class Form>
using HeldForm =
    std::conditional_t<std::is_trivially_copyable_v<Form>, const Form, const Form&>;

// d.<field> = g * dscore/dfield; dp[i] += g * dscore/dp[i]. `d` arrives zeroed.
template <class Score, class Form, class S>
[[gnu::always_inline]] inline void differentiate_score(const Form& form, const PairOf<Score, S>& pair,
                                                       const ScalarsOf<Score, S>& p, S g,
                                                       PairOf<Score, S>& d,
                                                       ScalarsOf<Score, S>& dp) {
  if constexpr (HasScoreVjp<Score, S>)
    form.score_vjp(pair, p, g, d, dp);
  else
    detail::differentiate_by_duals(form, pair, p, g, d, dp);
}

}  // namespace heed::inline HEED_ABI
