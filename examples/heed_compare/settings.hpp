// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../program/program.hpp"

#include <heed/core/view.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace compare {

using heed::Index;

using heed_program::UsageError;

// What tensors hold. With bfloat16 large products are taken in bfloat16, too (heed::Precision::mixed), and all else in
// float; with bfloat16_storage all is computed in float.
enum class Dtype { float32, float64, bfloat16, bfloat16_storage };

// The name of the type on the command line and in reports.
[[nodiscard]] inline const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return "float";
    case Dtype::float64: return "double";
    case Dtype::bfloat16: return "bf16";
    default: return "bf16-storage";
  }
}

// The language model that --train trains with each variant.
struct ModelSizes {
  Index width = 128, heads = 4, depth = 3, len = 128, batch = 4;
};

// What to compare, and where the results go.
struct Settings {
  std::vector<std::string> variants;  // in the order of the list
  heed::Shape shape;                  // (B, H, T, d) of the baseline
  bool causal = false;
  bool quick = false;
  int threads = 1;
  std::vector<Dtype> dtypes;
  std::uint64_t seed = 1;
  Index train_steps = 0;        // 0: nothing is trained
  int seeds = 1;                // number of runs, with seeds seed, seed + 1, ...
  double learning_rate = 2e-3;  // peak of the schedule
  std::string init = "fan-in";  // first weights, as ModelConfig has them
  ModelSizes model;             // its len is that of the task where there is one
  std::string task;  // spec of the task that is trained on (tasks/task_list.hpp); empty: a text
  std::string text_file, then_file;  // empty: not given
  std::string json_file, csv_file;   // empty: not given; "-": standard output
  std::string report_folder;         // of the page of pictures; empty: not given

  // Rounds of timings of a dtype: at least min_rounds(), and at most max_rounds() while seconds_per_dtype() are not used
  // up.
  [[nodiscard]] int min_rounds() const { return quick ? 3 : 5; }
  [[nodiscard]] int max_rounds() const { return quick ? 3 : 9; }
  [[nodiscard]] double seconds_per_dtype() const { return 50; }
};

// The settings of a command line. `finished` is true where nothing remains to be done, as after --help.
struct ParsedCommandLine {
  Settings settings;
  bool finished = false;
};

// Throws UsageError.
[[nodiscard]] ParsedCommandLine parse_command_line(int argc, char** argv);

}  // namespace compare
