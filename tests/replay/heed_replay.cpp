// SPDX-License-Identifier: Apache-2.0

// heed_replay DIR replays every golden case of a folder (golden/FORMAT.md), operators, layers and models, in double and
// in float. It prints a line per case with its worst errors. Exit code 0 if none failed, 1 if one did or the output was
// lost, 2 if the folder cannot be read.

#include "program/run.hpp"
#include "replay/module.hpp"
#include "replay/run.hpp"

#include <heed/version.hpp>

#include <cstdio>
#include <functional>

namespace {

using heed_test::GoldenCase;
using heed_test::Report;
using Replay = std::function<void(const GoldenCase&, Report&)>;

const std::map<std::string, Replay>& replays() {
  static const std::map<std::string, Replay> table = {
      {"sdpa", heed_test::replay_sdpa},
      {"dar", heed_test::replay_dar},
      {"diff_split", heed_test::replay_differential},
      {"diff_ms", heed_test::replay_differential_v1},
      {"intent", heed_test::replay_intent},
      {"ode", heed_test::replay_ode},
      {"ode_equilibrium", heed_test::replay_ode},
      {"dialectical", heed_test::replay_dialectical},
      {"proto", heed_test::replay_prototype},
      {"art_update", heed_test::replay_art},
      {"exclusive", heed_test::replay_exclusive},
      {"gated", heed_test::replay_gated},
      {"laser", heed_test::replay_laser},
      {"key_list", heed_test::replay_key_list},
      {"top_k", heed_test::replay_top_k},
      {"moba", heed_test::replay_moba},
      {"nsa", heed_test::replay_nsa},
      {"dsa", heed_test::replay_dsa},
      {"key_sink", heed_test::replay_key_sink},
      {"registers", heed_test::replay_registers},
      {"columns_lp", heed_test::replay_columns_lp},
      {"columns_decay", heed_test::replay_columns_decay},
  };
  return table;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// Replays one file and prints its line. Returns true if nothing failed.
bool replay(const std::filesystem::path& path) {
  const std::string file = path.stem().string();
  Report report;
  try {
    const GoldenCase golden(path);
    const std::string& variant = golden.variant();
    const auto found = replays().find(variant);
    if (found != replays().end())
      found->second(golden, report);
    else if (starts_with(variant, "module_"))
      heed_test::replay_module(golden, report);
    else if (starts_with(variant, "model_"))
      heed_test::replay_model(golden, report);
    else
      report.fail("its variant is " + variant + ", which heed_replay does not know");
  } catch (const std::exception& error) {
    report.fail(error.what());
  }
  const auto &exact = report.worst_exact(), &rounded = report.worst_float();
  std::printf("%s  %-28s double %.1e at %s; float %.1e (%.2f of the bound) at %s\n",
              report.passed() ? "pass" : "FAIL", file.c_str(), exact.error, exact.where.c_str(),
              rounded.error, rounded.share, rounded.where.c_str());
  for (const std::string& failure : report.failures()) std::printf("      %s\n", failure.c_str());
  return report.passed();
}

void print_help() {
  std::printf(
      "Replays every golden case (*.safetensors) of the folder DIR in double and in float, and "
      "compares each number with\n"
      "the stored one.\n"
      "Usage: heed_replay [OPTIONS] DIR\n\nOptions:\n"
      "  -h,--help   Prints this help and ends\n"
      "  --version   Prints the version and ends\n\n"
      "Standard output has a line for each case: pass or FAIL, and its worst errors. What failed "
      "stands indented below.\n"
      "The last line is \"N passed, N failed\".\n\n%s",
      heed_program::kExitCodes);
}

int replay_folder(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw heed_program::UsageError("DIR is \"" + folder + "\", it must be a folder that exists");
  const auto files = heed_program::as_usage([&] { return heed_test::golden_files(folder); });
  if (files.empty())
    throw heed_program::UsageError("DIR is \"" + folder + "\", it holds no *.safetensors file");
  int passed = 0, failed = 0;
  for (const auto& path : files) (replay(path) ? passed : failed) += 1;
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word == "--help" || word == "-h") {
    print_help();
    return 0;
  }
  if (word == "--version") {
    std::printf("heed_replay %s\n", heed::kVersionText);
    return 0;
  }
  if (starts_with(word, "-"))
    throw heed_program::UsageError("there is no option " + word + "; --help lists the options");
  if (argc != 2)
    throw heed_program::UsageError(std::to_string(argc - 1) +
                                   " folders were given, it must be one; --help says more");
  return replay_folder(word);
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run("heed_replay", [&] { return run(argc, argv); });
}
