// SPDX-License-Identifier: Apache-2.0
#pragma once

// A score whose columns fade: rows are keys, and behind them sums of decays of each channel.

#include <heed/plug/own_score.hpp>

namespace heed_test {

template <class T>
struct Fading {
  static constexpr int numbers_per_column = 2;
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return q[0] * k[0] * heed::math::exp(S(q[1] - k[1]));
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

}  // namespace heed_test
