// SPDX-License-Identifier: Apache-2.0

// Compares all variants of attention on real text: correctness of the gradients, time of forward
// and backward against the machine's peak and against plain attention, scratch memory; and, when asked to,
// what they are worth to a language model.
//
// Exit code  0 done, 1 a gradient is wrong or the work could not be finished, 2 options or files that cannot be
// used.

#include "../program/program.hpp"
#include "pictures.hpp"
#include "report.hpp"
#include "training_report.hpp"

namespace {

int run(int argc, char** argv) {
  if (const char* missing = compare::missing_instruction_set())
    throw std::runtime_error(std::string("compiled for ") + missing +
                             ", which this processor does not have; compile it on this machine");
  const compare::ParsedCommandLine parsed = compare::parse_command_line(argc, argv);
  if (parsed.finished) return 0;
  if (parsed.settings.train_steps > 0) {
    compare::report_training(parsed.settings);
    return 0;
  }
  const compare::Comparison comparison = compare::run_comparison(parsed.settings);
  heed_program::all_of(
      {[&] { compare::write_reports(parsed.settings, compare::this_machine(), comparison); },
       [&] { compare::write_pictures(parsed.settings, compare::this_machine(), comparison); }});
  compare::require_gradients(comparison);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run("heed_compare", [&] { return run(argc, argv); });
}
