// SPDX-License-Identifier: Apache-2.0
#pragma once

// A score that falls with the distance, as a user writes one: torch_own_test makes a library of it.

#include <heed/plug/own_score.hpp>

#include <tuple>

template <class T>
struct Recency {
  heed::Param<T> slope = T(0.5);
  static constexpr auto parameters = std::tuple{heed::named("slope", &Recency::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * heed::distance(pair);
  }
};
