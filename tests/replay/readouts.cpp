// SPDX-License-Identifier: Apache-2.0
// Readouts that are formulas, of the zoo.

#include "../../examples/zoo/exclusive.hpp"
#include "../../examples/zoo/gated.hpp"
#include "../../examples/zoo/laser.hpp"
#include "run.hpp"

namespace heed_test {

namespace {

template <class T>
zoo::gated::Op<T> gated(const GoldenCase& golden) {
  zoo::gated::Op<T> op;
  op.readout.weight = golden.param<T>("w");
  op.readout.bias = golden.param<T>("b");
  return op;
}

}  // namespace

void replay_exclusive(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {}, report, []<class T>() { return zoo::exclusive::Op<T>{}; });
}
void replay_gated(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {{"weight", "dw"}, {"bias", "db"}}, report,
                 [&]<class T>() { return gated<T>(golden); });
}
void replay_laser(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {}, report, []<class T>() { return zoo::laser::Op<T>{}; });
}

}  // namespace heed_test
