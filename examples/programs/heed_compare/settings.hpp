// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../program/program.hpp"

#include <heed/core/view.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace compare {

using heed::Index;

using heed_program::UsageError;

// The type of tensors. With bfloat16 large products are also computed in bfloat16 (heed::Precision::mixed), and everything
// else in float; with bfloat16_storage everything is computed in float.
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
  Index width = 128, heads = 4, depth = 3, len = 128, batch = 4;  // len: of a text's sequences
};

// The name of the text among tasks.
inline constexpr const char* kText = "text";

// The settings of --train.
struct TrainingSettings {
  Index steps = 0;                           // 0: nothing is trained
  int seeds = 1;                             // number of runs, with seeds seed, seed + 1, ...
  std::vector<std::string> tasks = {kText};  // specs (tasks/task_list.hpp), or kText
  // Peaks of the schedule. If there are several, each variant gets the one that does best on rows
  // kept for this, in sweep_seeds runs with seeds seed + kSweepSeed, ...
  std::vector<double> rates = {2e-3};
  int sweep_seeds = 1;
  std::string init = "fan-in";  // first weights, as ModelConfig has them
  double ponder = 0;            // cost of a step, for attention that halts by learnt probabilities
  std::optional<double> ponder_prior;  // for models that have one; none: the default
  std::vector<Index> lengths;  // factors of length: tests with sequences so many times as long
  std::vector<double> noise;   // levels of noise: tests with so much noise in queries and keys
  std::optional<Index>
      evaluate_every;  // steps; 0: never. None: a twentieth of the steps, for a text never
  ModelSizes model;
  std::vector<std::string> then_files;  // texts that follow the first one
  int alphabets = 1;                    // stages of a task, each with tokens of its own
  std::string out_folder;               // folder of finished cells; empty: not given
  int jobs = 1;                         // cells at a time; 0: the plan chooses by measured steps
  int ranks = 1;                        // processes that a launcher of MPI started, each with jobs
  double rank_timeout = 0;  // seconds after which a silent rank counts as lost; 0: never
  bool only_plan = false;
};

// Larger than any number of --seeds.
inline constexpr std::uint64_t kSweepSeed = 1000;

// The variants to compare, their sizes, and the files for results.
struct Settings {
  std::vector<std::string> variants;  // in the order of the list
  heed::Shape shape;                  // (B, H, T, d) of the baseline
  bool causal = false;
  bool quick = false;
  int threads = 1;  // with training, of each cell
  std::vector<Dtype> dtypes;
  std::uint64_t seed = 1;
  TrainingSettings training;
  std::string text_file;            // empty: not given
  std::string json_file, csv_file;  // empty: not given; "-": standard output
  std::string report_folder;        // folder for the page of pictures; empty: not given

  [[nodiscard]] bool trains() const { return training.steps > 0; }
  // True if standard output gets data, so that tables go to standard error.
  [[nodiscard]] bool data_on_stdout() const { return json_file == "-" || csv_file == "-"; }

  // Rounds of timings of a dtype: at least min_rounds(); more, up to max_rounds(), until seconds_per_dtype() are used up.
  [[nodiscard]] int min_rounds() const { return quick ? 3 : 5; }
  [[nodiscard]] int max_rounds() const { return quick ? 3 : 9; }
  [[nodiscard]] double seconds_per_dtype() const { return 50; }
};

// The settings of a command line. `finished` is true if nothing remains to be done, as after --help.
struct ParsedCommandLine {
  Settings settings;
  bool finished = false;
};

// Throws UsageError for options that cannot be used.
[[nodiscard]] ParsedCommandLine parse_command_line(int argc, char** argv);

}  // namespace compare
