// SPDX-License-Identifier: Apache-2.0
#pragma once

// What some variants do with the first tokens of the text, in double by their slow twins. The parameters are
// those of the comparison: nothing is trained.

#include "settings.hpp"

namespace compare {

// Which of the views below the compared variants have: those of the same op show the same one.
struct InnerViews {
  bool resonance = false, convergence = false, tension = false;
};
[[nodiscard]] InnerViews inner_views(const std::vector<std::string>& variants);

// Numbers of one head, (len, len), the query's row first.
struct ResonanceMaps {
  Index len = 0;
  std::vector<double> weights;    // of the values; 0 where hidden
  std::vector<double> resonance;  // r, also where hidden
  std::vector<bool> hidden;       // by the causal mask
};
[[nodiscard]] ResonanceMaps dar_maps(const Settings& settings, const std::string& text, Index len);

// Residual of the flow after 1, 2, ..., `most` steps, mean over rows and heads:
// max_j |a_n - a_(n-1)|, from a uniform row.
[[nodiscard]] std::vector<double> ode_residuals(const Settings& settings, const std::string& text,
                                                Index len, int most);

// Numbers of one head for each token. Weights that are not trained hardly ever make a step as small as the
// comparison asks for; these rows may halt earlier and run for longer.
struct DialecticalRows {
  static constexpr int max_steps = 16;
  static constexpr double halt_eps = 0.07;
  std::vector<double> steps, tension;  // steps: those that were applied
};
[[nodiscard]] DialecticalRows dialectical_rows(const Settings& settings, const std::string& text,
                                               Index len);

}  // namespace compare
