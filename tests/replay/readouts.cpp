// SPDX-License-Identifier: Apache-2.0
// Readouts that are formulas, of the zoo.

#include "../../examples/zoo/exclusive.hpp"
#include "../../examples/zoo/gated.hpp"
#include "../../examples/zoo/laser.hpp"
#include "run.hpp"

namespace heed_test {

namespace {

template <class Op>
void check_lse(const Op& op, const GoldenCase& golden, Report& report) {
  report.exact("lse", run_engine(op, golden).saved.lse, golden.tensor("lse"));
}

template <class T>
zoo::gated::Op<T> gated(const GoldenCase& golden) {
  zoo::gated::Op<T> op;
  op.readout.weight = golden.param<T>("w");
  op.readout.bias = golden.param<T>("b");
  return op;
}

}  // namespace

void replay_exclusive(const GoldenCase& golden, Report& report) {
  check_operator(golden, {}, report, []<class T>() { return zoo::exclusive::Op<T>{}; });
  check_lse(zoo::exclusive::Op<double>{}, golden, report);
}
void replay_gated(const GoldenCase& golden, Report& report) {
  check_operator(golden, {{"weight", "dw"}, {"bias", "db"}}, report,
                 [&]<class T>() { return gated<T>(golden); });
  check_lse(gated<double>(golden), golden, report);
}
void replay_laser(const GoldenCase& golden, Report& report) {
  check_operator(golden, {}, report, []<class T>() { return zoo::laser::Op<T>{}; });
  check_lse(zoo::laser::Op<double>{}, golden, report);
}

}  // namespace heed_test
