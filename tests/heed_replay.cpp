// SPDX-License-Identifier: Apache-2.0

// heed_replay DIR: every golden case of a folder (golden/FORMAT.md), operators, layers and models, in
// double and in float. One line per case with its worst errors; exit code 0 when none failed, 1 when
// one did, 2 when the folder cannot be read.

#include "replay/module.hpp"
#include "replay/run.hpp"

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
  };
  return table;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// True when nothing failed.
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
      report.fail("the variant " + variant + " is unknown");
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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || std::string(argv[1]) == "--help") {
    std::fprintf(stderr, "usage: heed_replay DIR   replays every *.safetensors of a folder\n");
    return argc == 2 ? 0 : 2;
  }
  std::vector<std::filesystem::path> files;
  try {
    files = heed_test::golden_files(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heed_replay: %s\n", error.what());
    return 2;
  }
  if (files.empty()) {
    std::fprintf(stderr, "heed_replay: %s holds no *.safetensors file\n", argv[1]);
    return 2;
  }
  int passed = 0, failed = 0;
  for (const auto& path : files) (replay(path) ? passed : failed) += 1;
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
