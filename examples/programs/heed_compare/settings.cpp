// SPDX-License-Identifier: Apache-2.0
#include "settings.hpp"

#include "../laboratory/experiment.hpp"
#include "../laboratory/training_settings.hpp"
#include "runner.hpp"

#include "../../zoo/layers.hpp"
#include "../../zoo/left_out.hpp"
#include "../program/options.hpp"
#include "../program/words.hpp"
#include "../report/page.hpp"

#include <heed/core/parallel.hpp>
#include <heed/version.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace compare {

namespace {

constexpr heed::Shape kShape{1, 4, 2048, 64};
constexpr heed::Shape kQuickShape{1, 4, 512, 64};

constexpr const char* kOutput =
    "\nThe gradient check compares with central differences; an error of up to 3e-6 in double, "
    "1e-4 in float or 0.1 in bf16 passes.\n"
    "Shares of the peak are those of float multiply-adds in bf16, too, and may pass 100 % there.\n"
    "Standard output has the table. Progress is a line on standard error if that is a terminal.\n"
    "bench/FORMATS.md describes the fields of --json and --csv and the files of --report.\n";

// Values of options in the words of the command line.
struct Words {
  std::string variants, shape, dtype = "both", threads = "0", seed = "1";
};

using heed_program::joined;
using heed_program::kMaxThreads;
using heed_program::split;
using heed_program::detail::read_number;

// All variants that can be compared; with training the controls, which come first.
[[nodiscard]] std::vector<std::string> known_names(bool trains) {
  std::vector<std::string> names = trains ? training_controls() : std::vector<std::string>{};
  for (std::string& name : variant_names()) names.push_back(std::move(name));
  return names;
}

// A name for all variants of the zoo.
constexpr const char* kZoo = "zoo";

// `hiding` is the option that hides later keys, or null: variants that read them by design are then
// refused, and kZoo leaves them out.
[[nodiscard]] std::vector<std::string> read_variants(const std::string& text,
                                                     const std::vector<std::string>& known,
                                                     const char* hiding) {
  std::vector<std::string> asked = split(text), all = zoo_names();
  if (hiding != nullptr) std::erase_if(all, zoo::reads_later_keys);
  if (!all.empty() && std::erase(asked, kZoo) > 0)
    asked.insert(asked.end(), all.begin(), all.end());
  for (const std::string& name : asked) {
    if (zoo::is_left_out(name))
      throw UsageError("--variants names \"" + name + "\", " + zoo::kLeftOut);
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError("--variants names \"" + name + "\", which is not one of " + joined(known) +
                       heed_program::did_you_mean(name, known));
    if (hiding != nullptr && zoo::reads_later_keys(name))
      throw UsageError("--variants names \"" + name + "\", which reads later keys by design; " +
                       hiding + " hides them");
  }
  std::vector<std::string> chosen;
  for (const std::string& name : known)
    if (std::find(asked.begin(), asked.end(), name) != asked.end()) chosen.push_back(name);
  return chosen;
}

[[nodiscard]] heed::Shape read_shape(const std::string& text) {
  const std::vector<std::string> items = split(text);
  Index n[4] = {};
  bool good = items.size() == 4;
  for (std::size_t i = 0; good && i < 4; ++i) good = read_number(items[i], n[i]) && n[i] >= 1;
  if (!good)
    throw UsageError("--shape is \"" + text +
                     "\", it must be four positive whole numbers B,H,T,d such as 1,4,2048,64");
  if (n[3] % 2 != 0)
    throw UsageError("--shape is \"" + text + "\", its last number, the width of a head, is " +
                     items[3] + ", it must be even: differential attention reads halves of a head");
  return {n[0], n[1], n[2], n[3]};
}

// Throws UsageError if the machine has less memory than the comparison needs: all variants together
// hold about `tensors` arrays of the baseline's shape, in double.
void require_memory(const heed::Shape& shape) {
  constexpr double tensors = 32;
  const double needed = tensors * 8 * double(shape.batch) * double(shape.heads) *
                        double(shape.len) * double(shape.dim);
  const double present = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
  if (present > 0 && needed > present) {
    char text[160];
    std::snprintf(
        text, sizeof text,
        "--shape needs about %.1f GB of memory for all variants, this machine has %.1f GB",
        needed * 1e-9, present * 1e-9);
    throw UsageError(text);
  }
}

[[nodiscard]] std::vector<Dtype> read_dtypes(const std::string& text) {
  if (text == "float") return {Dtype::float32};
  if (text == "double") return {Dtype::float64};
  if (text == "both") return {Dtype::float32, Dtype::float64};
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::bfloat16_storage})
    if (text == dtype_name(dtype)) return {dtype};
  throw UsageError("--dtype is \"" + text +
                   "\", it must be float, double, both, bf16 or bf16-storage");
}

[[nodiscard]] int read_threads(const std::string& text) {
  int threads = -1;
  if (!read_number(text, threads) || threads < 0 || threads > kMaxThreads)
    throw UsageError("--threads is \"" + text +
                     "\", it must be a whole number from 0 (the default) to " +
                     std::to_string(kMaxThreads));
  return heed::resolve_threads(threads);
}

[[nodiscard]] std::uint64_t read_seed(const std::string& text) {
  std::uint64_t seed = 0;
  if (!read_number(text, seed))
    throw UsageError("--seed is \"" + text + "\", it must be a whole number from 0 to 2^64 - 1");
  return seed;
}

void declare(CLI::App& app, Settings& settings, Words& words) {
  app.set_help_flag("--help,-h", "Prints this help and ends");
  app.set_version_flag("--version", std::string("heed_compare ") + heed::kVersionText,
                       "Prints the version and ends");
  app.footer(std::string(heed_program::kExitCodes) + kOutput);
  const std::string of_zoo =
      zoo_names().empty() ? "" : "; of the zoo, or zoo for all of these: " + joined(zoo_names());
  app.add_option("--variants", words.variants,
                 "Variants to compare, separated by commas (default: all of heed's): " +
                     joined(variant_names()) + of_zoo + "; with --train also the controls " +
                     joined(training_controls()) + "; " + kFrozenMemory + " and " + kNoMemory +
                     ", whose memory learns before --then or --alphabets, or never, run only "
                     "where they are named")
      ->type_name("A,B,...");
  app.add_option(
         "--shape", words.shape,
         "Number of sequences, heads and tokens, and width of a head, which must be even (default "
         "1,4,2048,64; with --quick 1,4,512,64)")
      ->type_name("B,H,T,d");
  app.add_flag("--causal", settings.causal, "Lets each token see only itself and those before it");
  app.add_option("--threads", words.threads,
                 "Number of threads, at most 1024 (default 0: OMP_NUM_THREADS, or all processors)")
      ->type_name("N");
  app.add_option(
         "--dtype", words.dtype,
         "float, double or both of them; bf16: tensors and products in bfloat16, all else "
         "in float; bf16-storage: tensors of bfloat16, all computed in float (default both)")
      ->type_name("TYPE");
  app.add_flag(
      "--quick", settings.quick,
      "Compares in less time: fewer tokens, and three rounds of timings instead of five to "
      "nine. With --task it trains, too: 200 steps, two seeds and heed's own variants in a small "
      "model, where no other option says how many");
  app.add_option("--seed", words.seed, "Seed of all random numbers (default 1)")->type_name("N");
  app.add_option("--text", settings.text_file,
                 "Text to compare on. Timings take its bytes as tokens and repeat it as often as "
                 "needed (default: a text inside the program)")
      ->type_name("FILE")
      ->check(heed_program::path_of("file"));
  app.add_option("--json", settings.json_file,
                 "Writes the results as JSON; - is standard output, and the table then moves to "
                 "standard error")
      ->type_name("FILE")
      ->check(heed_program::path_of("file"));
  app.add_option("--csv", settings.csv_file, "Writes the results as CSV; - as for --json")
      ->type_name("FILE")
      ->check(heed_program::path_of("file"));
  app.add_option(
         "--report", settings.report_folder,
         "Folder to write: report.html, a page of pictures, and each picture as an SVG file")
      ->type_name("FOLDER")
      ->check(heed_program::path_of("folder"));
}

// Says on standard error which of the given options have no effect.
void note_unused(const CLI::App& app, const Settings& settings) {
  std::vector<std::string> unused = training_options();
  if (settings.trains()) unused = {"--shape", "--causal", "--dtype"};
  for (const std::string& option : unused)
    if (app.count(option) > 0)
      std::fprintf(stderr, "heed_compare: %s has no effect %s --train\n", option.c_str(),
                   settings.trains() ? "with" : "without");
}

// The file that an option names; none for "-", which is standard output.
[[nodiscard]] heed_program::NamedFile named(const char* option, const std::string& file) {
  return {option, file == "-" ? "" : file};
}

void require_outputs(const Settings& settings) {
  const heed_program::NamedFile json = named("--json", settings.json_file),
                                csv = named("--csv", settings.csv_file);
  std::vector<heed_program::NamedFile> inputs = {{"--text", settings.text_file}};
  for (const std::string& file : settings.training.then_files) inputs.push_back({"--then", file});
  if (!settings.json_file.empty() && settings.json_file == settings.csv_file)
    throw UsageError("--json and --csv both name \"" + settings.json_file + "\"");
  for (const heed_program::NamedFile& output : {json, csv}) {
    heed_program::require_apart(output, inputs);
    if (!output.path.empty()) heed_program::require_output(output.option, output.path);
  }
  if (!json.path.empty() && !csv.path.empty() && heed_program::same_file(json.path, csv.path))
    throw UsageError("--json \"" + json.path + "\" and --csv \"" + csv.path + "\" name one file");
  inputs.insert(inputs.end(), {json, csv});
  heed_program::require_pages_apart({"--report", settings.report_folder}, inputs);
  if (settings.report_folder.empty()) return;
  try {
    heed_report::prepare_folder(settings.report_folder);
  } catch (const std::runtime_error& error) {
    throw UsageError(error.what());
  }
}

}  // namespace

ParsedCommandLine parse_command_line(int argc, char** argv) {
  ParsedCommandLine parsed;
  Settings& settings = parsed.settings;
  Words words;
  CLI::App app(
      "Compares variants of attention on a text: the time of forward and backward as a share of "
      "the "
      "machine's peak and relative to plain attention (sdpa), scratch memory, and a check of the "
      "gradients.",
      "heed_compare");
  TrainingWords training;
  declare(app, settings, words);
  declare_training(app, training, settings);
  if (!heed_program::read_options(app, argc, argv)) {
    parsed.finished = true;
    return parsed;
  }
  if (training.asks_for_help()) {
    print_task_help();
    parsed.finished = true;
    return parsed;
  }
  settings.threads = read_threads(words.threads);
  settings.seed = read_seed(words.seed);
  take_training(app, training, settings);
  std::vector<std::string> known = known_names(settings.trains());
  settings.variants = settings.trains() && settings.quick ? variant_names() : known;
  if (settings.trains()) known.insert(known.end(), {kFrozenMemory, kNoMemory});
  if (app.count("--variants") > 0) {
    for (std::string& name : zoo_names()) known.push_back(std::move(name));
    const char* hiding = settings.trains() ? "--train" : settings.causal ? "--causal" : nullptr;
    settings.variants = read_variants(words.variants, known, hiding);
  }
  settings.shape = app.count("--shape") > 0 ? read_shape(words.shape)
                   : settings.quick         ? kQuickShape
                                            : kShape;
  settings.dtypes = read_dtypes(words.dtype);
  note_unused(app, settings);
  if (!settings.trains()) require_memory(settings.shape);
  require_outputs(settings);
  return parsed;
}

}  // namespace compare
