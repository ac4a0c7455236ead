// SPDX-License-Identifier: Apache-2.0
#pragma once

// Views of how dar, ode and dialectical treat the first tokens of the text, computed in double by
// their references. The parameters are those of the comparison: nothing is trained.

#include "settings.hpp"

namespace compare {

// The views that the compared variants have: variants of the same op show the same one.
struct InnerViews {
  bool resonance = false, convergence = false, tension = false;
};
[[nodiscard]] InnerViews inner_views(const std::vector<std::string>& variants);

// Numbers of each pair in one head, (len, len): a row for each query.
struct ResonanceMaps {
  Index len = 0;
  std::vector<double> weights;    // attention weights; 0 where hidden
  std::vector<double> resonance;  // r, also where hidden
  std::vector<bool> hidden;       // by the causal mask
};
[[nodiscard]] ResonanceMaps dar_maps(const Settings& settings, const std::string& text, Index len);

// The residual of the flow after n = 1, 2, ..., `most` steps from a uniform row: max_j |a_n - a_(n-1)|, mean over rows
// and heads.
[[nodiscard]] std::vector<double> ode_residuals(const Settings& settings, const std::string& text,
                                                Index len, int most);

// Numbers of one head for each token. With untrained weights hardly any step is small enough for a row to halt under the
// comparison's settings; here rows may halt at larger steps, and may take more of them.
struct DialecticalRows {
  static constexpr int max_steps = 16;
  static constexpr double halt_eps = 0.07;
  std::vector<double> steps, tension;  // `steps` counts the steps taken
};
[[nodiscard]] DialecticalRows dialectical_rows(const Settings& settings, const std::string& text,
                                               Index len);

}  // namespace compare
