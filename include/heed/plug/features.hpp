// SPDX-License-Identifier: Apache-2.0
#pragma once

// Derived values of rows that many scores use, and functions that a pair's score computes from them. A
// score inherits ScoreWith<SquaredNorms>, or a formula names them: using Features = SquaredNorms;
//
//   SquaredNorms, SquaredKeyNorms   |x|^2 of both rows, of the key        d|x|^2 = 2 x . dx
//   InverseNorms                    1/(|x| + 1e-8) of both rows           df = -f^2 x . dx / |x|
//   LogVisible                      log of the number of keys that the query sees, 0 for none or one

#include <heed/plug/score.hpp>
#include <heed/simd/log.hpp>
#include <heed/simd/row_norm.hpp>

namespace heed {
inline namespace HEED_ABI {

// One number f per query row and per key row, by the same function: pair.query[0] and pair.key[0].
// `Feature` has of(row) and vjp(row, f, df, add), which adds df * df/drow.
template <class Feature>
struct BothRows {
  static constexpr int query_features = 1, key_features = 1;
  static constexpr bool counts_visible = false;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = Feature::template of<S>(row);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = Feature::template of<S>(row);
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    Feature::vjp(row, f[0], df[0], add);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    Feature::vjp(row, f[0], df[0], add);
  }
};

// One number f of each key row: pair.key[0].
template <class Feature>
struct KeyRows : BothRows<Feature> {
  static constexpr int query_features = 0;
  template <class Row, class S>
  void query_features_of(const Row&, S*) const {}
  template <class Row, class S, class Add>
  void query_features_vjp(const Row&, const S*, const S*, const Add&) const {}
};

// |x|^2; infinite where a square is too large.
struct SquaredNorm {
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row) {
    const auto x = [&row](Index c) { return row.x(c); };
    return math::dot_product(row.dim(), x, x);
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S&, const S& df, const Add& add) {
    const S twice = df + df;
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, twice * row.x(c));
  }
};
using SquaredNorms = BothRows<SquaredNorm>;
using SquaredKeyNorms = KeyRows<SquaredNorm>;

// 1/(|x| + eps), any finite row; a row of zeros has gradient 0.
struct InverseNorm {
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row, double eps = 1e-8) {
    return math::constant<S>(1) / (norm<S>(row) + math::constant<S>(eps));
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S& f, const S& df, const Add& add) {
    const S along = over_norm(S(-(df * f * f)), norm<S>(row));
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, along * row.x(c));
  }

 private:
  template <class S, class Row>
  [[nodiscard]] static S norm(const Row& row) {
    return row_norm<S>(row.dim(), [&row](Index c) { return row.x(c); });
  }
};
using InverseNorms = BothRows<InverseNorm>;

// pair.query[0] = log n, n the number of keys that the query sees.
struct LogVisible : NothingDerived {
  static constexpr int query_features = 1;
  static constexpr bool counts_visible = true;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = math::log(math::maximum(row.visible(), math::constant<S>(1)));
  }
};

// cos(q, k) for a pair with InverseNorms.
template <class S>
[[nodiscard, gnu::always_inline]] inline S cosine(const Pair<S, 1, 1>& pair) {
  return pair.dot * pair.query[0] * pair.key[0];
}
// |q - k|^2 for a pair with SquaredNorms. If q = k, rounding may take it below 0, and its square
// root has no finite derivative: under a root, use math::maximum with a small number.
template <class S>
[[nodiscard, gnu::always_inline]] inline S squared_distance(const Pair<S, 1, 1>& pair) {
  return pair.query[0] + pair.key[0] - (pair.dot + pair.dot);
}
// |i - j|
template <class S, int QueryFeatures, int KeyFeatures>
[[nodiscard, gnu::always_inline]] inline S distance(
    const Pair<S, QueryFeatures, KeyFeatures>& pair) {
  return math::absolute(S(pair.query_index - pair.key_index));
}

}  // namespace HEED_ABI
}  // namespace heed
