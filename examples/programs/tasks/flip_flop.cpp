// SPDX-License-Identifier: Apache-2.0
#include "flip_flop.hpp"

#include "draws.hpp"

namespace tasks {

Description<FlipFlop::Options> FlipFlop::describe() {
  using O = Options;
  return {"flip-flop",
          "Reads the bit that was written last and ignores the others",
          "Liu et al. 2023",
          "instructions since the last write",
          {},
          {128, 0.8},
          {{"len", &O::len, 4, 65536, "tokens of a sequence with the last answer"},
           {"p_ignore", &O::p_ignore, 0, 1, "probability of an instruction to ignore"}}};
}

FlipFlop::FlipFlop(const Options& options)
    : Task(checked_spec<FlipFlop>(options)), options_(options) {
  heed::require(options.len % 2 == 0, "--task flip-flop: len is ", options.len,
                ", it must be even");
}

Sequence FlipFlop::sequence(const Place& place) const {
  Draws draws(place);
  Sequence sequence;
  Index memory = zero, written = 0;
  for (Index t = 0; t < options_.len; t += 2) {
    const bool ignores = draws.chance(options_.p_ignore), writes = draws.chance(0.5);
    const Index drawn = zero + draws.below(2);
    const Index instruction = t == 0                  ? write
                              : t == options_.len - 2 ? read
                              : ignores               ? ignore
                              : writes                ? write
                                                      : read;
    if (instruction == write) {
      memory = drawn;
      written = t;
    }
    if (instruction == read)
      sequence.answers.push_back({t, memory, (t - written) / 2, written + 1, 1});
    sequence.inputs.push_back(instruction);
    sequence.inputs.push_back(instruction == read ? memory : drawn);
  }
  sequence.inputs.pop_back();  // the last answer is not read
  return sequence;
}

std::vector<Task::Test> FlipFlop::tests() const {
  std::vector<Test> tests;
  add_test<FlipFlop>(tests, "sparse", {options_.len, 0.98});
  add_test<FlipFlop>(tests, "dense", {options_.len, 0.1});
  return tests;
}

}  // namespace tasks
