// SPDX-License-Identifier: Apache-2.0
// Forward mode through features that read parameters, and through relative rows: the transpose of backward.

#include "direction.hpp"
#include "learnt_features.hpp"

#include <cmath>

using namespace heed;
using namespace heed_test;

TEST_CASE("Forward mode through learnt features and relative rows is the transpose of backward",
          "[jvp]") {
  OwnAttention<Shaw, double> op;
  op.score.weight = {0.3, 0.4, 0.5, 0.6};
  for (Index n = 0; n < op.score.rows.size(); ++n)
    op.score.rows[n] = 0.5 * std::sin(1 + 3 * double(n));
  OpCall<OwnAttention<Shaw, double>> call(op, {2, 4, 4, 2, 19, 23, 6, 5, 4},
                                          causal<double>(Align::bottom_right));
  const Direction<OwnAttention<Shaw, double>> direction(call, 7);
  const auto found = run_jvp(call, direction, false);
  CHECK(transpose_gap(call, direction, found) < 1e-12);
  CHECK(distance(found.out_tangent, difference_quotient(call, direction, 1e-5)) < 1e-7);
}
