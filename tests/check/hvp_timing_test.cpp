// SPDX-License-Identifier: Apache-2.0
// The cost of Hessian-vector products beside backward.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/hvp_timing.hpp>
#include <heed/ops/scaled_dot.hpp>

using namespace heed;
using heed_test::message_of;

TEST_CASE("time_hvp tells the minimum, the median and the quartiles") {
  HvpTiming timing;
  timing.hvp = {1e-3, 2e-3, 3e-3, 4e-3};
  timing.ratio = {1.1, 1.2, 1.3, 1.4};
  CHECK(timing.text() == "hvp 3 ms (minimum 1, quartiles 2 to 4), 1.3 x backward (1.2 to 1.4)");
  const HvpTiming run =
      time_hvp(ScaledDot<float>{}, {1, 2, 2, 1, 40, 40, 8, 8}, causal<float>(), 3);
  CHECK(run.hvp.minimum > 0);
  CHECK(run.hvp.minimum <= run.hvp.median);
  CHECK(run.ratio.lower <= run.ratio.upper);
}

TEST_CASE("time_hvp refuses sizes that no call has") {
  const ScaledDot<double> op;
  Geometry g{1, 3, 3, 2, 5, 5, 4, 4};
  CHECK(message_of([&] { (void)time_hvp(op, g); }) ==
        "time_hvp: 3 heads cannot share 2 kv_heads evenly");
  g.kv_heads = 3;
  CHECK(message_of([&] { (void)time_hvp(op, g, {}, 0); }) ==
        "time_hvp: repeats is 0, it must be positive");
}
