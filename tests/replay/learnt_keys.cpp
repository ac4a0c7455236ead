// SPDX-License-Identifier: Apache-2.0
// Keys that belong to the op, of the zoo.

#include "../../examples/zoo/key_sink.hpp"
#include "../../examples/zoo/registers.hpp"
#include "run.hpp"

namespace heed_test {

namespace {

template <class T>
zoo::key_sink::Op<T> sinks(const GoldenCase& golden) {
  zoo::key_sink::Op<T> op;
  op.normaliser.keys = golden.param<T>("sink_k");
  return op;
}
template <class T>
zoo::registers::Op<T> registers(const GoldenCase& golden) {
  zoo::registers::Op<T> op;
  op.normaliser.keys = golden.param<T>("sink_k");
  op.normaliser.values = golden.param<T>("sink_v");
  return op;
}

}  // namespace

void replay_key_sink(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {{"keys", "dsink_k"}}, report,
                 [&]<class T>() { return sinks<T>(golden); });
}
void replay_registers(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {{"keys", "dsink_k"}, {"values", "dsink_v"}}, report,
                 [&]<class T>() { return registers<T>(golden); });
}

}  // namespace heed_test
