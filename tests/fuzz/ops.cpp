// SPDX-License-Identifier: Apache-2.0
// The list of ops from which cases draw.

#include "fuzz/op.hpp"

namespace fuzz {

const std::vector<OpEntry>& op_list() {
  static const std::vector<OpEntry> list = {
      {"sdpa", 1, draw_sdpa},
      {"dar", 3, draw_dar},
      {"dar-converged", 20, draw_dar_converged},
      {"differential", 2, draw_differential},
      {"differential-v1", 2, draw_differential_v1},
      {"differential-v2", 2, draw_differential_v2},
      {"intent", 1, draw_intent},
      {"intent-from-q", 1, draw_intent_from_q},
      {"intent-calculated", 1, draw_intent_calculated},
      {"ode", 3, draw_ode},
      {"ode-equilibrium", 60, draw_ode_equilibrium},
      {"prototype", 4, draw_prototype},
      {"dialectical", 4, draw_dialectical},
      {"own recency", 2, draw_recency},
      {"own bump", 2, draw_bump},
      {"own columns", 2, draw_apart},
      {"own parts", 2, draw_own_parts},
  };
  return list;
}

}  // namespace fuzz
