// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls the feature functions of a score. Functions that read the head's parameters take them
// behind the row, and their vjp adds to the gradients of the parameters:
//
//   query_features_of(row, p, f)                       f[0..query_features) of a row and the parameters p[0], p[1], ...
//   query_features_vjp(row, p, f, df, add, dp)         adds df . df/drow through `add`, and dp[i] += df . df/dp[i]
//
// Without such a vjp dual numbers differentiate the features by the parameters. They may then read the row's place, index()
// and visible(), and no column of it.
//
// S is a pack of rows; for hvp() it is a dual number of packs, in the features and in their vjp.

#include <heed/core/error.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/plug/score.hpp>
#include <heed/plug/token_inputs.hpp>

#include <array>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

// The position of a row, and the number of keys that it sees: all that features may read when dual
// numbers differentiate them.
template <class S>
struct RowPlace {
  using Scalar = S;
  S position{}, seen{};

  [[nodiscard]] S index() const { return position; }
  [[nodiscard]] S visible() const { return seen; }
  template <class Column>
  [[nodiscard]] S x(Column) const {
    static_assert(sizeof(Column) == 0,
                  "heed: features that read columns of their row and parameters need "
                  "query_features_vjp(row, p, f, df, add, dp), or key_features_vjp "
                  "(plug/feature_calls.hpp)");
    return {};
  }
};

namespace detail {

// Selects a score's features of query rows, or of key rows.
struct OfQueries {
  template <class Score>
  static constexpr int count = Score::query_features;
  template <class Score, class... Arguments>
  static auto of(const Score& score, Arguments&&... arguments)
      -> decltype(score.query_features_of(std::forward<Arguments>(arguments)...)) {
    return score.query_features_of(std::forward<Arguments>(arguments)...);
  }
  template <class Score, class... Arguments>
  static auto vjp(const Score& score, Arguments&&... arguments)
      -> decltype(score.query_features_vjp(std::forward<Arguments>(arguments)...)) {
    return score.query_features_vjp(std::forward<Arguments>(arguments)...);
  }
};
struct OfKeys {
  template <class Score>
  static constexpr int count = Score::key_features;
  template <class Score, class... Arguments>
  static auto of(const Score& score, Arguments&&... arguments)
      -> decltype(score.key_features_of(std::forward<Arguments>(arguments)...)) {
    return score.key_features_of(std::forward<Arguments>(arguments)...);
  }
  template <class Score, class... Arguments>
  static auto vjp(const Score& score, Arguments&&... arguments)
      -> decltype(score.key_features_vjp(std::forward<Arguments>(arguments)...)) {
    return score.key_features_vjp(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace detail

// True if the features of these rows (detail::OfQueries, detail::OfKeys) read the head's parameters.
template <class Rows, class Score>
inline constexpr bool features_read_parameters = requires(const Score& score,
                                                          const RowPlace<double>& row,
                                                          const ScalarsOf<Score, double>& p,
                                                          double* f) {
  Rows::of(score, row, p, f);
};

namespace detail {

template <class Rows, class Score, class Row, class S>
void features_of(const Score& score, const Row& row, const ScalarsOf<Score, S>& p, S* f) {
  if constexpr (features_read_parameters<Rows, Score>)
    Rows::of(score, row, p, f);
  else
    Rows::of(score, row, f);
}

// dp[i] += df . df/dp[i]
template <class Rows, class Score, class Row, class S>
void features_by_duals(const Score& score, const Row& row, const ScalarsOf<Score, S>& p,
                       const S* df, ScalarsOf<Score, S>& dp) {
  constexpr int features = Rows::template count<Score>;
  using D = LaneDual<S, scalars_of<Score>>;
  ScalarsOf<Score, D> lifted;
  for_directions<scalars_of<Score>>([&](auto i) { lifted[i] = D::template variable<i>(p[i]); });
  D f[std::size_t(features)];
  Rows::of(score, RowPlace<D>{D(row.index()), D(row.visible())}, lifted, f);
  for (int n = 0; n < features; ++n)
    for_directions<scalars_of<Score>>([&](auto i) {
      if (f[n].moves[i]) dp[i] += df[n] * f[n].grad[i];
    });
}

// Adds df . df/drow through `add` and, where the features read them, to the gradients of the parameters.
template <class Rows, class Score, class Row, class S, class Add>
void features_vjp(const Score& score, const Row& row, const ScalarsOf<Score, S>& p, const S* f,
                  const S* df, const Add& add, ScalarsOf<Score, S>& dp) {
  if constexpr (!features_read_parameters<Rows, Score>)
    Rows::vjp(score, row, f, df, add);
  else if constexpr (requires { Rows::vjp(score, row, p, f, df, add, dp); })
    Rows::vjp(score, row, p, f, df, add, dp);
  else
    features_by_duals<Rows>(score, row, p, df, dp);
}

// The parameters p of head h in every lane.
template <class Real, class Score>
[[nodiscard]] ScalarsOf<Score, Pack<Real>> lanes_of_scalars(const Score& score, Index h) {
  ScalarsOf<Score, Pack<Real>> p;
  for (int i = 0; i < scalars_of<Score>; ++i)
    p[std::size_t(i)] = Pack<Real>(scalar_of<Real>(score, i, h));
  return p;
}
// True if one of the p has a value per head.
template <class Score>
[[nodiscard]] bool scalars_differ_by_head(const Score& score) {
  bool differ = false;
  for_each_scalar<Score>(
      [&](const auto& entry, int) { differ = differ || (score.*entry.member).size() > 1; });
  return differ;
}

// A row of ones that also takes gradients. It throws where features read a number of the token that there is not.
template <class Real>
struct CountedRow {
  using Scalar = Pack<Real>;
  const char *where, *argument;
  Index width, inputs;

  [[nodiscard]] Index dim() const { return width; }
  [[nodiscard]] Index rank() const { return 0; }
  [[nodiscard]] Index table_rows() const { return 0; }
  [[nodiscard]] Scalar x(Index) const { return Real(1); }
  [[nodiscard]] Scalar projected(Index) const { return Real(1); }
  [[nodiscard]] Scalar table(Index) const { return Real(1); }
  [[nodiscard]] Scalar index() const { return Real(1); }
  [[nodiscard]] Scalar visible() const { return Real(1); }
  [[nodiscard]] Scalar input(Index c) const {
    check(c, "row.input(", "read");
    return Real(1);
  }
  void add_x(Index, Scalar) const {}
  void add_projected(Index, Scalar) const {}
  void add_table(Index, Scalar) const {}
  void add_input(Index c, Scalar) const { check(c, "add.add_input(", "add to"); }

 private:
  void check(Index c, const char* call, const char* verb) const {
    require(c >= 0 && c < inputs, where, ": features of the score ", verb, " ", call, c,
            "), the score's ", argument, " gives each token so many numbers: ", inputs,
            " (plug/token_inputs.hpp)");
  }
};

// Runs the features of a row once, and their vjp.
template <class Rows, class Real, class Score>
void run_features(const Score& score, const CountedRow<Real>& row) {
  using S = Pack<Real>;
  [[maybe_unused]] ScalarsOf<Score, S> p, dp{};
  p.fill(S(Real(1)));
  constexpr std::size_t count = std::size_t(Rows::template count<Score>);
  [[maybe_unused]] std::array<S, count> f{}, df{};
  [[maybe_unused]] S *to = f.data(), *from = df.data();
  if constexpr (features_read_parameters<Rows, Score>) {
    if constexpr (requires { Rows::of(score, row, p, to); }) Rows::of(score, row, p, to);
    if constexpr (requires { Rows::vjp(score, row, p, to, from, row, dp); })
      Rows::vjp(score, row, p, to, from, row, dp);
  } else {
    if constexpr (requires { Rows::of(score, row, to); }) Rows::of(score, row, to);
    if constexpr (requires { Rows::vjp(score, row, to, from, row); })
      Rows::vjp(score, row, to, from, row);
  }
}

// Throws, its sentence starting with `where`, if features read numbers of tokens that the score
// does not declare. The engine's rows do not check this.
template <class Real, class Score>
void require_declared_inputs(const Score& score, Index dim, const char* where) {
  const char* of_queries = sums_inputs<Score> ? "key_inputs" : "query_inputs";
  run_features<OfQueries>(score, CountedRow<Real>{where, of_queries, dim, query_row_inputs<Score>});
  run_features<OfKeys>(score, CountedRow<Real>{where, "key_inputs", dim, key_inputs_of<Score>});
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
