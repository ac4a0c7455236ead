// SPDX-License-Identifier: Apache-2.0
#include "settings.hpp"

#include "runner.hpp"
#include "training.hpp"

#include "../program/options.hpp"
#include "../program/words.hpp"
#include "../report/page.hpp"
#include "../tasks/task_list.hpp"
#include "../zoo/layers.hpp"

#include <heed/core/parallel.hpp>

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

// Values of options as they stand on the command line, not yet converted.
struct Words {
  std::string variants, shape, dtype = "both", threads = "0", seed = "1";
};

using heed_program::kMaxThreads;
using heed_program::split;
using heed_program::detail::read_number;

[[nodiscard]] std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return text;
}

// All variants that can be compared; with training the controls, which come first.
[[nodiscard]] std::vector<std::string> known_names(bool trains) {
  std::vector<std::string> names = trains ? training_controls() : std::vector<std::string>{};
  for (std::string& name : variant_names()) names.push_back(std::move(name));
  return names;
}

// Stands for all variants of the zoo.
constexpr const char* kZoo = "zoo";

// `hiding` is the option that hides later keys, or null: what reads them by design is refused then, and is no part of kZoo.
[[nodiscard]] std::vector<std::string> read_variants(const std::string& text,
                                                     const std::vector<std::string>& known,
                                                     const char* hiding) {
  std::vector<std::string> asked = split(text), all = zoo_names();
  if (hiding != nullptr) std::erase_if(all, zoo::reads_later_keys);
  if (!all.empty() && std::erase(asked, kZoo) > 0)
    asked.insert(asked.end(), all.begin(), all.end());
  for (const std::string& name : asked) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError("--variants names \"" + name + "\", which is not one of " + joined(known));
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

// Throws UsageError where the machine has less memory than the comparison needs: all variants together hold about
// `tensors` arrays of the baseline's shape, in double.
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
    throw UsageError("--threads is \"" + text + "\", it must be a whole number from 0 (OpenMP's " +
                     "default) to " + std::to_string(kMaxThreads));
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
  app.set_version_flag("--version", "heed_compare " HEED_VERSION, "Prints the version and ends");
  app.footer(std::string(heed_program::kExitCodes) + kOutput);
  const std::string of_zoo =
      zoo_names().empty() ? "" : "; of the zoo, or zoo for all of these: " + joined(zoo_names());
  app.add_option("--variants", words.variants,
                 "Variants to compare, separated by commas (default: all of heed's): " +
                     joined(variant_names()) + of_zoo + "; with --train also the controls " +
                     joined(training_controls()))
      ->type_name("A,B,...");
  app.add_option(
         "--shape", words.shape,
         "Number of sequences, heads and tokens, and width of a head, which must be even (default "
         "1,4,2048,64; with --quick 1,4,512,64)")
      ->type_name("B,H,T,d");
  app.add_flag("--causal", settings.causal, "Lets each token see only itself and those before it");
  app.add_option("--threads", words.threads,
                 "Number of threads, at most 1024 (default 0: OpenMP's own choice)")
      ->type_name("N");
  app.add_option(
         "--dtype", words.dtype,
         "float, double or both of them; bf16: tensors and products in bfloat16, all else "
         "in float; bf16-storage: tensors of bfloat16, all computed in float (default both)")
      ->type_name("TYPE");
  app.add_flag(
      "--quick", settings.quick,
      "Compares in less time: fewer tokens, and three rounds of timings instead of five to "
      "nine");
  app.add_option("--seed", words.seed, "Seed of all random numbers (default 1)")->type_name("N");
  app.add_option("--train", settings.train_steps,
                 "Instead of timings: trains a small language model with each variant for so many "
                 "steps, and compares their losses on the part of the text that is held out")
      ->type_name("STEPS")
      ->check(heed_program::whole(1, heed_program::kMaxSteps));
  app.add_option("--seeds", settings.seeds,
                 "With --train: number of runs of each variant, 1 to 1000, with seeds --seed and "
                 "up (default 1)")
      ->type_name("N")
      ->check(heed_program::whole(1, 1000));
  const auto add_size = [&](const char* name, Index& size, const char* text) {
    app.add_option(name, size, std::string("With --train: ") + text)
        ->type_name("N")
        ->capture_default_str()
        ->check(heed_program::whole(1, heed_program::kMaxSize));
  };
  add_size("--width", settings.model.width, "width of the model, a multiple of --heads");
  add_size("--heads", settings.model.heads, "number of heads");
  add_size("--depth", settings.model.depth, "number of blocks");
  add_size("--len", settings.model.len, "number of tokens of a sequence");
  add_size("--batch", settings.model.batch, "number of sequences per step");
  app.add_option("--lr", settings.learning_rate, "With --train: peak of the learning rate")
      ->type_name("X")
      ->capture_default_str()
      ->check(heed_program::number(0, 1e30));
  app.add_option("--init", settings.init,
                 "With --train: first weights, normal numbers: fan-in, with deviation "
                 "1 / sqrt(columns of the matrix), or gpt2, with 0.02 whatever the width")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--task", settings.task,
                 "With --train: trains on a generated task instead of a text, such as mqar or "
                 "mqar:len=128,pairs=8, and compares accuracy and loss on its answers (default "
                 "text); the defaults are then --width 64 --heads 2 --depth 2 --batch 64. help "
                 "lists all tasks with their numbers and sources")
      ->type_name("NAME");
  app.add_option("--text", settings.text_file,
                 "Text to compare on. Timings take its bytes as tokens and repeat it as often as "
                 "needed (default: a text inside the program)")
      ->type_name("FILE")
      ->check(heed_program::path_of("file"));
  app.add_option(
         "--then", settings.then_file,
         "With --train: a second text that each model goes on with for as many steps, to see how "
         "much of the first it forgets")
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
  app.add_option("--report", settings.report_folder,
                 "Folder for report.html, a page of pictures, and for each picture as an SVG file")
      ->type_name("FOLDER")
      ->check(heed_program::path_of("folder"));
}

// Says on standard error which of the given options have no effect.
void note_unused(const CLI::App& app, bool trains) {
  const std::vector<const char*> unused =
      trains ? std::vector<const char*>{"--shape", "--causal", "--dtype", "--quick"}
             : std::vector<const char*>{"--seeds", "--width", "--heads", "--depth",
                                        "--len",   "--batch", "--lr",    "--init"};
  for (const char* option : unused)
    if (app.count(option) > 0)
      std::fprintf(stderr, "heed_compare: %s has no effect %s --train\n", option,
                   trains ? "with" : "without");
}

// Stands for no task.
constexpr const char* kText = "text";

// Checks --task, and sets the length of sequences by it.
void take_task(const CLI::App& app, Settings& settings) {
  if (settings.task == kText) settings.task.clear();
  if (settings.task.empty()) return;
  if (settings.train_steps == 0) throw UsageError("--task needs --train STEPS");
  for (const char* option : {"--text", "--then"})
    if (app.count(option) > 0)
      throw UsageError("--task is " + settings.task + " and " + option +
                       " names a text; it must be one of both");
  // Sizes with which plain attention learns the tasks within minutes.
  const auto unless_given = [&](const char* option, Index& size, Index value) {
    if (app.count(option) == 0) size = value;
  };
  unless_given("--width", settings.model.width, 64);
  unless_given("--heads", settings.model.heads, 2);
  unless_given("--depth", settings.model.depth, 2);
  unless_given("--batch", settings.model.batch, 64);
  try {
    const auto task = tasks::make_task(settings.task);
    settings.task = task->spec();
    settings.model.len = task->len();
    for (const tasks::Task::Test& test : task->tests())
      settings.model.len = std::max(settings.model.len, test.task->len());
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  if (app.count("--len") > 0)
    std::fputs("heed_compare: --len has no effect with --task, whose numbers say how long\n",
               stderr);
}

// The file that an option names; none for "-", which is standard output.
[[nodiscard]] heed_program::NamedFile named(const char* option, const std::string& file) {
  return {option, file == "-" ? "" : file};
}

void require_outputs(const Settings& settings) {
  const heed_program::NamedFile json = named("--json", settings.json_file),
                                csv = named("--csv", settings.csv_file);
  const std::vector<heed_program::NamedFile> inputs = {{"--text", settings.text_file},
                                                       {"--then", settings.then_file}};
  if (!settings.json_file.empty() && settings.json_file == settings.csv_file)
    throw UsageError("--json and --csv both name \"" + settings.json_file + "\"");
  for (const heed_program::NamedFile& output : {json, csv}) {
    heed_program::require_apart(output, inputs);
    if (!output.path.empty()) heed_program::require_output(output.option, output.path);
  }
  if (!json.path.empty() && !csv.path.empty() && heed_program::same_file(json.path, csv.path))
    throw UsageError("--json \"" + json.path + "\" and --csv \"" + csv.path + "\" name one file");
  heed_program::require_pages_apart({"--report", settings.report_folder},
                                    {inputs[0], inputs[1], json, csv});
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
  declare(app, settings, words);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    parsed.finished = true;
    return parsed;
  } catch (const CLI::CallForVersion& version) {
    std::puts(version.what());
    parsed.finished = true;
    return parsed;
  } catch (const CLI::ParseError& error) {
    throw UsageError(heed_program::sentence_of(error));
  }
  if (settings.task == "help") {
    std::fputs(tasks::help_text().c_str(), stdout);
    std::puts("text, the default, is not generated: it is read from --text.");
    parsed.finished = true;
    return parsed;
  }
  std::vector<std::string> known = known_names(settings.train_steps > 0);
  settings.variants = known;
  if (app.count("--variants") > 0) {
    for (std::string& name : zoo_names()) known.push_back(std::move(name));
    const char* hiding = settings.train_steps > 0 ? "--train"
                         : settings.causal        ? "--causal"
                                                  : nullptr;
    settings.variants = read_variants(words.variants, known, hiding);
  }
  settings.shape = app.count("--shape") > 0 ? read_shape(words.shape)
                   : settings.quick         ? kQuickShape
                                            : kShape;
  settings.dtypes = read_dtypes(words.dtype);
  settings.threads = read_threads(words.threads);
  settings.seed = read_seed(words.seed);
  if (app.count("--then") > 0 && settings.train_steps == 0)
    throw UsageError("--then needs --train STEPS");
  if (app.count("--task") > 0) take_task(app, settings);
  note_unused(app, settings.train_steps > 0);
  if (settings.train_steps == 0) require_memory(settings.shape);
  require_outputs(settings);
  return parsed;
}

}  // namespace compare
