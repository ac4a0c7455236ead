// SPDX-License-Identifier: Apache-2.0
#pragma once

// A score that adds sums over tokens to the logit (Forgetting Transformer).

#include <heed/plug/own_score.hpp>

namespace heed_test {

template <class Real>
struct Forgetting {
  using Features = heed::CumulativeInputs<1, heed::LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.query[0] - pair.key[0];
  }
};

}  // namespace heed_test
