// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops inside golden layers and models, from their metadata.

#include "module.hpp"

#include <heed/ops/dar.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/resonant_ode.hpp>

namespace heed_test {

[[nodiscard]] inline heed::DialecticalOptions dialectical_options(const GoldenCase& golden) {
  heed::DialecticalOptions options;
  options.max_steps = int(golden.integer("max_steps"));
  options.halt_eps = golden.number("halt_eps");
  options.halting =
      golden.text("halting") == "seed" ? heed::Halting::batch : heed::Halting::per_token;
  return options;
}

template <class T>
[[nodiscard]] heed::Dar<T> dar_of_layer(const GoldenCase& golden) {
  heed::Dar<T> op;
  op.score.strength = T(golden.number("lam"));
  op.score.vigilance = T(golden.number("rho"));
  op.score.sharpness = T(golden.number("alpha"));
  op.score.feedback = T(golden.number("beta"));
  op.score.iterations = int(golden.integer("iters"));
  return op;
}

template <class T>
[[nodiscard]] heed::ResonantOde<T> ode_of_layer(const GoldenCase& golden) {
  heed::ResonantOde<T> op;
  op.score.rho = T(golden.number("rho"));
  op.normaliser.eta = T(golden.number("eta"));
  op.normaliser.steps = int(golden.integer("n_steps"));
  return op;
}

}  // namespace heed_test
