// SPDX-License-Identifier: Apache-2.0

// heed_compare compares the variants of attention on a text: the time of forward and backward as a share of the
// machine's peak and relative to plain attention, scratch memory, and a check of the gradients.
// With --train it trains a small language model with each variant, and compares them.
//
// Exit code  0 done, 1 a gradient is wrong or the work could not be finished, 2 options or files that cannot be
// used.

#include "../laboratory/training_report.hpp"
#include "../program/ranks.hpp"
#include "pictures.hpp"
#include "report.hpp"

namespace {

// Throws UsageError if the settings do not suit several ranks.
void take_ranks(compare::Settings& settings, const heed_program::Ranks& ranks) {
  if (ranks.count() == 1) return;
  const std::string started = std::to_string(ranks.count()) + " ranks were started";
  if (!settings.trains())
    throw heed_program::UsageError(started +
                                   ", which share the work of --train alone; timings need a "
                                   "machine for themselves");
  if (settings.training.jobs > 1)
    throw heed_program::UsageError("--jobs is " + std::to_string(settings.training.jobs) + " and " +
                                   started +
                                   ", each of which trains one model at a time; it must be 1");
  settings.training.jobs = 1;
  settings.training.ranks = ranks.count();
}

int run(int argc, char** argv, heed_program::Ranks& ranks) {
  if (const char* missing = heed_program::missing_instruction_set())
    throw std::runtime_error(std::string("compiled for ") + missing +
                             ", which this processor does not have; compile heed_compare on this "
                             "machine");
  compare::ParsedCommandLine parsed = compare::parse_command_line(argc, argv);
  if (parsed.finished) return 0;
  take_ranks(parsed.settings, ranks);
  if (parsed.settings.trains()) {
    compare::report_training(parsed.settings, ranks);
    return 0;
  }
  const compare::Comparison comparison = compare::run_comparison(parsed.settings);
  heed_program::all_of(
      {[&] { compare::write_reports(parsed.settings, heed_program::this_machine(), comparison); },
       [&] {
         compare::write_pictures(parsed.settings, heed_program::this_machine(), comparison);
       }});
  compare::require_gradients(comparison);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run_on_ranks(
      "heed_compare", [&](heed_program::Ranks& ranks) { return run(argc, argv, ranks); });
}
