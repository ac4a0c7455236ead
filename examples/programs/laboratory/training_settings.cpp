// SPDX-License-Identifier: Apache-2.0
#include "training_settings.hpp"

#include "../program/options.hpp"
#include "../program/words.hpp"
#include "../tasks/task_list.hpp"

#include <heed/core/parallel.hpp>

#include <algorithm>
#include <cstdio>

namespace compare {

namespace {

using heed_program::split;
using heed_program::detail::read_number;

// Number of steps under --quick if no option sets it.
constexpr Index kQuickSteps = 200;
constexpr int kQuickSeeds = 2;
constexpr ModelSizes kQuickModel{64, 2, 2, 64, 16};
// Plain attention learns the tasks within minutes at these sizes.
constexpr ModelSizes kTaskModel{64, 2, 2, 128, 64};

constexpr Index kMostFactor = 64;

// The numbers of a list that commas separate, such as that of --noise. The list begins behind the first
// `behind` characters of the text.
template <class Number>
[[nodiscard]] std::vector<Number> read_list(const char* option, const std::string& text,
                                            Number least, Number most, const std::string& what,
                                            std::size_t behind = 0) {
  std::vector<Number> numbers;
  for (const std::string& item : split(text.substr(behind))) {
    Number x{};
    if (!read_number(item, x) || !(x >= least && x <= most))
      throw UsageError(std::string(option) + " is \"" + text + "\", it must be " + what);
    numbers.push_back(x);
  }
  std::vector<Number> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    throw UsageError(std::string(option) + " is \"" + text + "\", which has a number twice");
  return numbers;
}

[[nodiscard]] std::vector<double> read_sweep(const std::string& text) {
  const std::string what = "lr= and two or more learning rates such as lr=3e-4,1e-3,3e-3";
  const std::string beginning = "lr=";
  if (!text.starts_with(beginning))
    throw UsageError("--sweep is \"" + text + "\", it must be " + what);
  std::vector<double> rates =
      read_list("--sweep", text, 0.0, heed_program::kMaxReal, what, beginning.size());
  if (rates.size() < 2) throw UsageError("--sweep is \"" + text + "\", it must be " + what);
  return rates;
}

// Sets the sizes that no option gives.
void take_sizes(const CLI::App& app, const ModelSizes& sizes, ModelSizes& to) {
  const auto take = [&](const char* option, Index ModelSizes::*size) {
    if (app.count(option) == 0) to.*size = sizes.*size;
  };
  take("--width", &ModelSizes::width);
  take("--heads", &ModelSizes::heads);
  take("--depth", &ModelSizes::depth);
  take("--len", &ModelSizes::len);
  take("--batch", &ModelSizes::batch);
}

// Sets the defaults of --quick.
void take_quick(const CLI::App& app, Settings& settings) {
  TrainingSettings& training = settings.training;
  if (!settings.quick) return;
  if (training.steps == 0 && app.count("--task") > 0) training.steps = kQuickSteps;
  if (training.steps > 0 && app.count("--seeds") == 0) training.seeds = kQuickSeeds;
}

void require_texts(const CLI::App& app, const std::string& given,
                   const std::vector<std::string>& tasks) {
  const bool text = std::ranges::count(tasks, kText) > 0;
  for (const char* option : {"--text", "--then"})
    if (app.count(option) > 0 && (!text || (tasks.size() > 1 && option == std::string("--then"))))
      throw UsageError("--task is " + given + " and " + option +
                       " names a text; it must be one of both");
  if (app.count("--alphabets") > 0 && text)
    throw UsageError("--alphabets was given and --task is " + given +
                     ", but a text has one alphabet");
  if (app.count("--len") > 0 && !text)
    std::fputs("heed_compare: --len has no effect with --task, whose numbers say how long\n",
               stderr);
}

}  // namespace

std::vector<std::string> read_tasks(const std::string& text) {
  std::vector<std::string> specs;
  if (text == "all") {
    for (const tasks::Entry& entry : tasks::task_list()) specs.push_back(entry.name);
    specs.emplace_back(kText);
  } else {
    for (const std::string& item : split(text)) {
      // "pairs=8" continues the parameters of the task before it; "mqar:len=128" and "parity" are tasks.
      const std::size_t equals = item.find('='), colon = item.find(':');
      const bool goes_on =
          equals != std::string::npos && (colon == std::string::npos || colon > equals);
      if (goes_on && !specs.empty())
        specs.back() += "," + item;
      else
        specs.push_back(item);
    }
  }
  try {
    for (std::string& spec : specs)
      if (spec != kText) spec = tasks::make_task(spec)->spec();
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (std::count(specs.begin(), specs.end(), specs[i]) > 1)
      throw UsageError("--task names " + specs[i] + " twice");
  return specs;
}

void declare_training(CLI::App& app, TrainingWords& words, Settings& settings) {
  TrainingSettings& training = settings.training;
  app.add_option("--train", training.steps,
                 "Instead of timings: trains a small language model with each variant for so many "
                 "steps, and compares their losses on what is held out")
      ->type_name("STEPS")
      ->check(heed_program::whole(1, heed_program::kMaxSteps));
  app.add_option("--seeds", training.seeds,
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
  add_size("--width", training.model.width, "width of the model, a multiple of --heads");
  add_size("--heads", training.model.heads, "number of heads");
  add_size("--depth", training.model.depth, "number of blocks");
  add_size("--len", training.model.len, "number of tokens of a sequence of text");
  add_size("--batch", training.model.batch, "number of sequences per step");
  app.add_option("--lr", words.rate, "With --train: peak of the learning rate")
      ->type_name("X")
      ->capture_default_str()
      ->check(heed_program::number(0, 1e30));
  app.add_option("--init", training.init,
                 "With --train: first weights, normal numbers: fan-in, with deviation "
                 "1 / sqrt(columns of the matrix), or gpt2, with 0.02 whatever the width")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option(
         "--ponder", training.ponder,
         "With --train: cost of a step, in nats, of attention that halts by learnt "
         "probabilities (dialectical-act): training minimises the loss and so much times "
         "the mean of its steps. Of dialectical-pondernet, beta: so much times the distance "
         "of its steps from their prior (default 0)")
      ->type_name("X")
      ->check(heed_program::number(0, 1e30));
  app.add_option("--ponder-prior", training.ponder_prior,
                 "With --train: prior of dialectical-pondernet, the probability that a token that "
                 "is still there halts behind a step; above 0 and below 1 (default 0.3)")
      ->type_name("X")
      ->check(heed_program::probability());
  app.add_option("--sweep", words.sweep,
                 "With --train: runs each variant with each of these learning rates, chooses the "
                 "best by rows that no result is reported of, and then runs it with fresh seeds")
      ->type_name("lr=A,B,...");
  app.add_option("--sweep-seeds", training.sweep_seeds,
                 "With --sweep: number of runs of each learning rate (default 1)")
      ->type_name("N")
      ->check(heed_program::whole(1, 1000));
  app.add_option(
         "--task", words.tasks,
         "With --train: trains on generated tasks instead of a text, such as mqar or "
         "mqar:len=128,pairs=8,parity, and compares accuracy and loss on their answers "
         "(default text); the defaults are then --width 64 --heads 2 --depth 2 --batch 64. all "
         "is every task and the text; help lists all tasks with their numbers and sources")
      ->type_name("A,B,...");
  app.add_option("--eval-every", words.evaluate_every,
                 "With --train: scores the model every N steps on rows of its own, to see when 90 "
                 "% of its answers are right; 0 never (default: a twentieth of the steps with "
                 "--task, never on a text)")
      ->type_name("N")
      ->check(heed_program::whole(0, heed_program::kMaxSteps));
  app.add_option("--lengths", words.lengths,
                 "With --task: also tests on sequences so many times as long, such as 2,4,8, where "
                 "a task has such")
      ->type_name("A,B,...");
  app.add_option("--noise", words.noise,
                 "With --train: also tests with normal noise on queries and keys, of so many times "
                 "their root mean square, such as 0.1,0.3,1")
      ->type_name("A,B,...");
  app.add_option("--then", training.then_files,
                 "With --train: a text that each model goes on with for as many steps, to see how "
                 "much of the first it forgets; given again, a third one and so on")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->check(heed_program::path_of("file"));
  app.add_option("--alphabets", training.alphabets,
                 "With --task: goes on with the same task N - 1 times for as many steps, each time "
                 "with tokens that were not there before (default 1)")
      ->type_name("N")
      ->check(heed_program::whole(1, 64));
  app.add_option(
         "--out", training.out_folder,
         "With --train: folder that keeps every run that is finished; started again, the "
         "same command goes on with what is missing. Runs of the same settings may use it at "
         "once")
      ->type_name("FOLDER")
      ->check(heed_program::path_of("folder"));
  app.add_option("--jobs", training.jobs,
                 "With --train: trains N models at a time, each in a process of its own with a "
                 "share of the threads; results do not depend on it (default: one with all "
                 "threads, or one for each thread, by which measured steps are faster; 1 where "
                 "--threads is given)")
      ->type_name("N")
      ->check(heed_program::whole(1, heed_program::kMaxThreads));
  app.add_option("--rank-timeout", training.rank_timeout,
                 "With --train under mpirun, whose ranks train a model each at a time: seconds "
                 "without a word after which a rank counts as stuck and ends the run; 0 never "
                 "(default 0)")
      ->type_name("X")
      ->check(heed_program::number(0, heed_program::kMaxReal));
  app.add_flag("--plan", training.only_plan,
               "With --train: prints how many runs there are, how many of them are done, and how "
               "long the others will take, and ends");
}

std::vector<std::string> training_options() {
  return {"--seeds", "--init",  "--ponder",      "--ponder-prior", "--alphabets",
          "--width", "--heads", "--depth",       "--len",          "--batch",
          "--lr",    "--sweep", "--sweep-seeds", "--eval-every",   "--lengths",
          "--noise", "--out",   "--jobs",        "--rank-timeout", "--plan"};
}

void print_task_help() {
  std::fputs(tasks::help_text().c_str(), stdout);
  std::puts("text, the default, is not generated: it is read from --text.");
}

void take_training(const CLI::App& app, const TrainingWords& words, Settings& settings) {
  TrainingSettings& training = settings.training;
  take_quick(app, settings);
  if (training.steps == 0) {
    if (app.count("--then") > 0) throw UsageError("--then needs --train STEPS");
    if (app.count("--task") == 0) return;
    const std::string needs = "--task needs --train STEPS";
    try {
      (void)read_tasks(words.tasks);
    } catch (const UsageError& error) {
      throw UsageError(needs + "; and " + error.what());
    }
    throw UsageError(needs);
  }
  training.tasks = read_tasks(words.tasks);
  if (settings.quick)
    take_sizes(app, kQuickModel, training.model);
  else if (training.tasks != std::vector<std::string>{kText})
    take_sizes(app, kTaskModel, training.model);
  require_texts(app, words.tasks, training.tasks);
  training.rates = {words.rate};
  if (app.count("--sweep") > 0) {
    if (app.count("--lr") > 0)
      throw UsageError("--lr and --sweep were given; it must be one of both");
    training.rates = read_sweep(words.sweep);
  } else if (app.count("--sweep-seeds") > 0) {
    throw UsageError("--sweep-seeds needs --sweep");
  }
  if (app.count("--lengths") > 0)
    training.lengths = read_list<Index>(
        "--lengths", words.lengths, 2, kMostFactor,
        "whole numbers from 2 to " + std::to_string(kMostFactor) + " such as 2,4,8");
  if (app.count("--noise") > 0)
    training.noise =
        read_list("--noise", words.noise, 1e-9, 1e9, "numbers greater than 0 such as 0.1,0.3,1");
  if (app.count("--eval-every") > 0) training.evaluate_every = words.evaluate_every;
  if (app.count("--threads") == 0) {
    if (app.count("--jobs") == 0)
      training.jobs = 0;
    else
      settings.threads = std::max(1, settings.threads / training.jobs);
  }
}

}  // namespace compare
