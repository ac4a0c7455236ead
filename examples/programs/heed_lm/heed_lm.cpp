// SPDX-License-Identifier: Apache-2.0

// Small language models with any variant of attention: training, evaluation, generation of text,
// pictures of attention weights, and a look into files.
//
// Exit code  0 done, 1 the work could not be finished, 2 options or input that cannot be used.

#include "../program/options.hpp"
#include "../program/program.hpp"
#include "../program/ranks.hpp"
#include "commands.hpp"

#include <heed/version.hpp>

#include <algorithm>

namespace {

using namespace heed_lm;
using heed_program::kMaxSize;
using heed_program::kMaxSteps;
using heed_program::number;
using heed_program::path_of;
using heed_program::whole;

constexpr double kAny = heed_program::kMaxReal;

// Adds options to one command, each with the name of its value, its range and its default.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(app) {}

  void file(const char* name, std::string& value, const char* text,
            const char* kind = "FILE") const {
    app_.add_option(name, value, text)
        ->type_name(kind)
        ->check(path_of(std::string(kind) == "FILE" ? "file" : "folder"));
  }
  void required_file(const char* name, std::string& value, const char* text) const {
    app_.add_option(name, value, text)->type_name("")->required()->check(path_of("file"));
  }
  void size(const char* name, Index& value, const char* text, Index least = 1,
            Index most = kMaxSize) const {
    app_.add_option(name, value, text)
        ->type_name("N")
        ->capture_default_str()
        ->check(whole(least, most));
  }
  void real(const char* name, double& value, const char* text, double most = kAny) const {
    app_.add_option(name, value, text)
        ->type_name("X")
        ->capture_default_str()
        ->check(number(0, most));
  }
  void share(const char* name, double& value, const char* text) const {
    app_.add_option(name, value, std::string(text) + "; from 0 to below 1")
        ->type_name("X")
        ->capture_default_str()
        ->check(heed_program::share());
  }
  void probability(const char* name, double& value, const char* text) const {
    app_.add_option(name, value, std::string(text) + "; above 0 and below 1")
        ->type_name("X")
        ->capture_default_str()
        ->check(heed_program::probability());
  }
  void seed(std::uint64_t& value, const char* text) const {
    app_.add_option("--seed", value, text)
        ->type_name("N")
        ->capture_default_str()
        ->check(heed_program::seed());
  }
  void threads(int& value) const {
    app_.add_option("--threads", value,
                    "Number of threads, at most 1024; 0: OMP_NUM_THREADS, or all processors")
        ->type_name("N")
        ->capture_default_str()
        ->check(whole(0, heed_program::kMaxThreads));
  }
  void word(const char* name, std::string& value, const char* text) const {
    app_.add_option(name, value, text)->type_name("NAME");
  }

 private:
  CLI::App& app_;
};

void add_data(CLI::App& app, DataSettings& data) {
  const Options o(app);
  o.file("--text", data.text, "Data: a text, whose last part is held out");
  o.file("--instructions", data.instructions, "Data: instructions with answers, as JSON lines");
  o.word("--task", data.task,
         "Data: a generated task such as mqar or dyck:kinds=2,len=40, whose answers alone count; "
         "help lists them");
  o.word("--tokenizer", data.tokenizer,
         "How text becomes tokens: bytes, characters or gpt2 (default: gpt2 with --vocab, else "
         "characters with --text, else bytes; tasks have numbers, parens characters)");
  o.file("--vocab", data.vocab, "GPT-2's vocab.json, goes together with --merges");
  o.file("--merges", data.merges, "GPT-2's merges.txt, goes together with --vocab");
  o.word("--end-of-text", data.end_of_text,
         "What <|endoftext|> in --text or --instructions is: token, the end of a document, where "
         "the vocabulary has it, or text like any other (default: token)");
  o.share("--held-out", data.held_out,
          "Share of the data that is kept for validation, its end; 0: nothing, all is trained on");
}

void add_model(CLI::App& app, TrainCommand& c) {
  const Options o(app);
  app.add_option("--variant", c.model.variant,
                 "Kind of attention, or of a model with a frame of its own: " +
                     heed_program::joined(model_names()))
      ->type_name("NAME")
      ->capture_default_str();
  o.size("--width", c.model.width, "Width of the model, a multiple of --heads");
  o.size("--heads", c.model.heads, "Number of heads of each attention layer");
  o.size("--depth", c.model.depth, "Number of blocks");
  o.size("--hidden", c.model.hidden,
         "Width inside of the MLP; 0: four times --width, for dialectical-lm twice", 0);
  o.size("--len", c.data.len,
         "Number of tokens of a sequence (with --task other than parens: at least, and by default, "
         "those of its longest)");
  o.share("--dropout", c.model.dropout, "Share of embeddings and block outputs that is dropped");
  o.share("--attention-dropout", c.model.attention_dropout,
          "Share of the attention's weights that is dropped");
  app.add_option("--init", c.model.init,
                 "First weights, normal numbers: fan-in, with deviation 1 / sqrt(columns of the "
                 "matrix), or gpt2, with 0.02 whatever the width")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_flag_callback(
      "--untied", [&c] { c.model.tied = false; },
      "Gives the output a matrix of its own instead of the embedding");
  app.add_flag_callback(
      "--no-mask", [&c] { c.model.causal = false; },
      "Lets tokens of dialectical-lm see later ones, as in its source");
}

void add_train(CLI::App& app, TrainCommand& c) {
  const Options o(app);
  add_data(app, c.data);
  add_model(app, c);
  o.size("--batch", c.train.batch, "Number of sequences per step");
  o.size("--steps", c.train.steps, "Number of steps in all, those of a resumed run included", 1,
         kMaxSteps);
  o.size("--warmup", c.train.warmup, "Number of steps until the learning rate reaches its peak", 0,
         kMaxSteps);
  o.real("--lr", c.train.learning_rate, "Peak of the learning rate");
  o.real("--weight-decay", c.train.weight_decay,
         "Decay of matrices per step, as a multiple of the learning rate");
  o.real("--clip", c.train.clip, "Largest norm of the gradient, longer ones are scaled; 0: any");
  o.real(
      "--ponder", c.train.ponder,
      "Cost of a step, in nats, of attention that halts by learnt probabilities (dialectical-act): "
      "training minimises the loss and so much times the mean of its steps. Of "
      "dialectical-pondernet, beta: so much times the distance of its steps from their prior");
  o.probability(
      "--ponder-prior", c.train.ponder_prior,
      "Prior of dialectical-pondernet: probability that a token that is still there halts "
      "behind a step");
  o.seed(c.train.seed, "Seed of weights, batches and dropout");
  app.add_option("--precision", c.train.precision,
                 "float, or mixed: products of layers and of attention round their operands to "
                 "bfloat16 and add up in float; weights stay float")
      ->type_name("NAME")
      ->capture_default_str();
  o.file(
      "--out", c.out,
      "Checkpoint to write (default: that of --resume; without either nothing is kept). Where it "
      "holds the same run, of the same options and data, the run goes on from there");
  app.add_flag("--overwrite", c.overwrite,
               "Begins anew, and replaces a file of --out that is there already");
  o.file("--resume", c.resume,
         "Checkpoint to go on from. The run keeps its model and settings: other options must agree "
         "with them, --steps may be raised, and the data must be named again");
  o.file("--gpt2", c.gpt2, "model.safetensors of a Hugging Face GPT-2 to start from");
  o.file("--report", c.report,
         "Folder to write: report.html, a page of pictures, and each picture as an SVG file",
         "FOLDER");
  o.size("--eval-every", c.evaluate_every,
         "Number of steps between validations; 0: only one at the end", 0, kMaxSteps);
  o.size("--save-every", c.save_every,
         "Number of steps between checkpoints; 0: only one at the end", 0, kMaxSteps);
  o.threads(c.threads);
  o.size("--context-ranks", c.context_ranks,
         "Under mpirun: number of ranks that have the tokens of each sequence together, for long "
         "ones; it must divide the number of ranks");
  o.real("--rank-timeout", c.rank_timeout,
         "Under mpirun: seconds without a message after which a rank counts as stuck and ends the "
         "run, more than the longest step, validation or save takes; 0: never");
}

void add_eval(CLI::App& app, EvalCommand& c) {
  const Options o(app);
  o.required_file("checkpoint", c.checkpoint,
                  "Checkpoint of heed_lm train, or a Hugging Face GPT-2");
  add_data(app, c.data);
  o.size("--batch", c.batch, "Number of sequences at a time");
  o.threads(c.threads);
}

constexpr const char* kMark =
    "What <|endoftext|> in --prompt is: token, where the vocabulary has it, or text like any other "
    "(default: token)";

void add_generate(CLI::App& app, GenerateCommand& c) {
  const Options o(app);
  o.required_file("checkpoint", c.checkpoint,
                  "Checkpoint of heed_lm train, or a Hugging Face GPT-2");
  app.add_option(
         "--prompt", c.prompt,
         "Text to go on with; an empty one begins behind the end of another text, where the "
         "vocabulary has <|endoftext|> (default: so; else a line break; where the model "
         "has none, a space or its first token). Of one with more tokens than the model's "
         "--len it reads the last ones")
      ->type_name("TEXT");
  o.word("--end-of-text", c.end_of_text, kMark);
  app.add_flag("--stop-at-end", c.stop_at_end,
               "Stops where the model ends its text; without it the text goes on behind "
               "<|endoftext|>, which is written");
  o.size("--tokens", c.tokens, "Largest number of tokens to write", 0, kMaxSteps);
  o.real("--temperature", c.sampling.temperature,
         "How freely tokens are drawn; 0: always the likeliest token");
  o.size("--top-k", c.sampling.top_k, "Draws among so many of the likeliest tokens; 0: among all",
         0, kMaxSteps);
  o.real("--top-p", c.sampling.top_p,
         "Draws among the likeliest tokens that together have this probability, above 0", 1);
  o.seed(c.sampling.seed, "Seed of the draws");
  o.file("--vocab", c.vocab, "GPT-2's vocab.json, for a Hugging Face GPT-2");
  o.file("--merges", c.merges, "GPT-2's merges.txt, for a Hugging Face GPT-2");
  o.threads(c.threads);
}

void add_inspect(CLI::App& app, InspectCommand& c) {
  const Options o(app);
  o.required_file("checkpoint", c.checkpoint,
                  "Checkpoint of heed_lm train, or a Hugging Face GPT-2");
  app.add_option("--prompt", c.prompt, "Text whose tokens are looked at")
      ->type_name("TEXT")
      ->required();
  o.word("--end-of-text", c.end_of_text, kMark);
  const auto number = [&](const char* name, std::optional<Index>& value, const char* text) {
    app.add_option(name, value, text)->type_name("N")->check(whole(0, kMaxSize));
  };
  number("--layer", c.layer, "Layer, from 0 (default: all)");
  number("--head", c.head, "Head, from 0 (default: all)");
  o.size("--top", c.top, "Number of tokens that are named for each token, those of largest weight");
  app.add_option("--json", c.json,
                 "Writes all measures as JSON; - is standard output, the text then goes to "
                 "standard error")
      ->type_name("FILE")
      ->check(path_of("file"));
  o.file("--report", c.report,
         "Folder to write: report.html, a page of pictures, and each picture as an SVG file",
         "FOLDER");
  o.file("--vocab", c.vocab, "GPT-2's vocab.json, for a Hugging Face GPT-2");
  o.file("--merges", c.merges, "GPT-2's merges.txt, for a Hugging Face GPT-2");
  o.threads(c.threads);
}

// The five commands and the options that were given for each.
class CommandLine {
 public:
  CommandLine() {
    app_.set_help_flag("--help,-h", "Prints this help and ends");
    app_.set_version_flag("--version", std::string("heed_lm ") + heed::kVersionText,
                          "Prints the version and ends");
    app_.require_subcommand(1);
    app_.footer(std::string("heed_lm COMMAND --help lists the options of a command.\n\n") +
                heed_program::kExitCodes + kOutput);
    for (CLI::App* command : {train_app_, eval_app_, generate_app_, inspect_app_, info_app_}) {
      command->set_help_flag("--help,-h", "Prints this help and ends");
      command->footer(std::string(heed_program::kExitCodes) + kOutput);
    }
    add_train(*train_app_, train_);
    add_eval(*eval_app_, eval_);
    add_generate(*generate_app_, generate_);
    add_inspect(*inspect_app_, inspect_);
    Options(*info_app_).required_file("file", file_, "A safetensors file");
  }

  int run(int argc, char** argv, heed_program::Ranks& ranks) {
    require_command(argc, argv);
    train_.program = argv[0];
    return heed_program::read_options(app_, argc, argv) ? run_command(ranks) : 0;
  }

 private:
  static constexpr const char* kOutput =
      "\nStandard output has the results, a line each. Progress is a line on standard error if "
      "that "
      "is a terminal.\n"
      "bench/FORMATS.md describes the lines, the page of --report and checkpoints.\n";

  // Refuses a wrong command itself: CLI11 would only say that a command is required.
  void require_command(int argc, char** argv) const {
    const std::string word = argc > 1 ? argv[1] : "";
    if (word.rfind("-", 0) == 0) return;
    std::vector<std::string> names;
    for (const CLI::App* command : {train_app_, eval_app_, generate_app_, inspect_app_, info_app_})
      names.push_back(command->get_name());
    if (std::ranges::count(names, word) > 0) return;
    throw heed_program::UsageError(
        "the command is \"" + word +
        "\", it must be train, eval, generate, inspect or info; --help says more" +
        heed_program::did_you_mean(word, names));
  }
  int run_command(heed_program::Ranks& ranks) {
    if (*train_app_) {
      for (const CLI::Option* option : train_app_->get_options())
        if (option->count() > 0) train_.given[option->get_name()] = option->results().back();
      train_.data.seed = train_.model.seed = train_.train.seed;
      return run_train(train_, ranks);
    }
    if (ranks.count() > 1)
      throw heed_program::UsageError(
          "the command is " + app_.get_subcommands().front()->get_name() +
          ", which runs in one process, and " + std::to_string(ranks.count()) +
          " ranks were started; they share the work of train alone");
    if (*eval_app_) return run_eval(eval_);
    if (*generate_app_) return run_generate(generate_);
    if (*inspect_app_) return run_inspect(inspect_);
    return run_info(file_);
  }

  CLI::App app_{"Trains, evaluates and asks small language models with any variant of attention.",
                "heed_lm"};
  CLI::App* train_app_ = app_.add_subcommand("train", "Trains a model, or goes on training one");
  CLI::App* eval_app_ =
      app_.add_subcommand("eval", "Computes the loss on the part of the data that was held out");
  CLI::App* generate_app_ = app_.add_subcommand("generate", "Goes on with a text");
  CLI::App* inspect_app_ = app_.add_subcommand(
      "inspect", "Shows which tokens of a text read which, in each layer and head");
  CLI::App* info_app_ = app_.add_subcommand("info", "Lists what a file of weights holds");
  TrainCommand train_;
  EvalCommand eval_;
  GenerateCommand generate_;
  InspectCommand inspect_;
  std::string file_;
};

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run_on_ranks(
      "heed_lm", [&](heed_program::Ranks& ranks) { return CommandLine().run(argc, argv, ranks); });
}
