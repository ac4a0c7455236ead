// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/scaled_dot.hpp>

namespace heed_test {

void replay_sdpa(const GoldenCase& golden, Report& report) {
  check_operator(golden, {}, report, []<class T>() { return heed::ScaledDot<T>{}; });
  const heed::ScaledDot<double> op;
  report.exact("lse", run_engine(op, golden).saved.lse, golden.tensor("lse"));
  if (golden.has("attn")) report.exact("attn", engine_weights(op, golden), golden.tensor("attn"));
}

}  // namespace heed_test
