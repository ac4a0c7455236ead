// SPDX-License-Identifier: Apache-2.0

// Compares all variants of attention on real text: correctness of the gradients, time of forward
// and backward against the machine's peak and against plain attention, scratch memory; and, when asked to,
// what they are worth to a language model.
//
// Exit code  0 done, 1 internal error, 2 options or files that cannot be used.

#include "compare/pictures.hpp"
#include "compare/report.hpp"
#include "compare/training_report.hpp"

#include <cstdio>
#include <new>

namespace {

int complain(const char* text, int code) {
  std::fprintf(stderr, "heed_compare: %s\n", text);
  return code;
}

int run(int argc, char** argv) {
  const compare::ParsedCommandLine parsed = compare::parse_command_line(argc, argv);
  if (parsed.finished) return 0;
  if (parsed.settings.train_steps > 0) {
    compare::report_training(parsed.settings);
  } else {
    const compare::Comparison comparison = compare::run_comparison(parsed.settings);
    compare::write_reports(parsed.settings, compare::this_machine(), comparison);
    compare::write_pictures(parsed.settings, compare::this_machine(), comparison);
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return complain("standard output cannot be written", 1);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* missing = compare::missing_instruction_set()) {
    std::fprintf(stderr,
                 "heed_compare: compiled for %s, which this processor does not have; "
                 "compile it on this machine\n",
                 missing);
    return 1;
  }
  try {
    return run(argc, argv);
  } catch (const compare::UsageError& error) {
    return complain(error.what(), 2);
  } catch (const std::bad_alloc&) {
    return complain("there is not enough memory for this shape", 1);
  } catch (const std::exception& error) {
    return complain(error.what(), 1);
  }
}
