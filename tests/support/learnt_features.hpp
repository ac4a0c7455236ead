// SPDX-License-Identifier: Apache-2.0
#pragma once

// An own score of relative rows whose features read parameters.

#include <heed/plug/own_score.hpp>

#include <tuple>
#include <vector>

namespace heed_test {

// Features of queries differentiated by duals, and of keys by hand: p0 log(1 + i) and p1 |k|^2 / 8.
struct Learnt : heed::NothingDerived {
  static constexpr int query_features = 1, key_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[0] * heed::math::log1p(row.index());
  }
  template <class Row, class S>
  void key_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[1] * heed::SquaredNorm::of<S>(row) * S(0.125);
  }
  template <class Row, class P, class S, class Add>
  void key_features_vjp(const Row& row, const P& p, const S* f, const S* df, const Add& add,
                        P& dp) const {
    dp[1] += df[0] * heed::SquaredNorm::of<S>(row) * S(0.125);
    heed::SquaredNorm::vjp(row, f[0], S(p[1] * df[0] * S(0.125)), add);
  }
};
template <class T>
struct Shaw {
  using Features = Learnt;
  heed::Param<T> rise = T(0.3), weight = T(0.4),
                 rows = heed::Param<T>(std::vector<heed::Index>{1, 7, 6});
  std::vector<heed::Index> shape(const heed::Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{heed::named("rise", &Shaw::rise), heed::named("weight", &Shaw::weight),
                 heed::tensor("rows", &Shaw::rows, &Shaw::shape)};
  static constexpr auto relative_rows = &Shaw::rows;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (S(1.0) + pair.query[0]) - pair.key[0] + S(0.3) * pair.table;
  }
};

}  // namespace heed_test
