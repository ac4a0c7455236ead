// SPDX-License-Identifier: Apache-2.0

// Small language models with any variant of attention: training, evaluation, text, and what a file holds.
//
// Exit code  0 done, 1 internal error, 2 options or files that cannot be used.

#include "lm/commands.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <new>

namespace {

using namespace heed_lm;

void add_data(CLI::App& app, DataSettings& data) {
  app.add_option("--text", data.text, "Text to learn, the last part held out");
  app.add_option("--instructions", data.instructions, "Instructions with answers, JSON lines");
  app.add_option("--task", data.task, "parens: balanced parentheses");
  app.add_option("--tokenizer", data.tokenizer, "bytes, characters or gpt2");
  app.add_option("--vocab", data.vocab, "GPT-2's vocab.json");
  app.add_option("--merges", data.merges, "GPT-2's merges.txt");
  app.add_option("--held-out", data.held_out, "Part of the data that validation keeps")->capture_default_str();
}

void add_train(CLI::App& app, TrainCommand& c) {
  add_data(app, c.data);
  app.add_option("--variant", c.model.variant, "Attention in the frame of GPT-2, or a stack with its own")
      ->check(CLI::IsMember(model_names()))
      ->capture_default_str();
  app.add_option("--width", c.model.width)->capture_default_str();
  app.add_option("--heads", c.model.heads)->capture_default_str();
  app.add_option("--depth", c.model.depth, "Number of blocks")->capture_default_str();
  app.add_option("--hidden", c.model.hidden, "Width inside of the MLP; 0: four times the width");
  app.add_option("--len", c.data.len, "Tokens of a sequence")->capture_default_str();
  app.add_option("--dropout", c.model.dropout, "Of embeddings and blocks")->capture_default_str();
  app.add_option("--attention-dropout", c.model.attention_dropout, "Of the attention's weights")
      ->capture_default_str();
  app.add_flag("--untied{false}", c.model.tied, "A head of its own");
  app.add_flag("--no-mask{false}", c.model.causal, "dialectical-lm as in its source");
  app.add_option("--batch", c.train.batch, "Sequences per step")->capture_default_str();
  app.add_option("--steps", c.train.steps)->capture_default_str();
  app.add_option("--warmup", c.train.warmup, "Steps")->capture_default_str();
  app.add_option("--lr", c.train.learning_rate, "Peak of the learning rate")->capture_default_str();
  app.add_option("--weight-decay", c.train.weight_decay)->capture_default_str();
  app.add_option("--clip", c.train.clip, "Largest norm of a gradient; 0: any")->capture_default_str();
  app.add_option("--seed", c.train.seed)->capture_default_str();
  app.add_option("--out", c.out, "Checkpoint to write");
  app.add_option("--resume", c.resume, "Checkpoint to go on from");
  app.add_option("--gpt2", c.gpt2, "model.safetensors of a Hugging Face GPT-2 to start from");
  app.add_option("--report", c.report, "Folder for a page with pictures of the run")->type_name("FOLDER");
  app.add_option("--eval-every", c.evaluate_every, "Steps")->capture_default_str();
  app.add_option("--save-every", c.save_every, "Steps")->capture_default_str();
  app.add_option("--threads", c.threads, "0: all");
}

// The command line; exit() after --help, CLI::ParseError otherwise.
int run(int argc, char** argv) {
  CLI::App app("Small language models with any variant of attention", "heed_lm");
  app.require_subcommand(1);
  TrainCommand train;
  EvalCommand eval;
  GenerateCommand generate;
  std::string file;
  CLI::App* train_app = app.add_subcommand("train", "Trains a model, or goes on training one");
  add_train(*train_app, train);
  CLI::App* eval_app = app.add_subcommand("eval", "Loss on the part of the data that was held out");
  eval_app->add_option("checkpoint", eval.checkpoint)->required();
  add_data(*eval_app, eval.data);
  eval_app->add_option("--batch", eval.batch)->capture_default_str();
  eval_app->add_option("--threads", eval.threads, "0: all");
  CLI::App* generate_app = app.add_subcommand("generate", "Goes on with a text");
  generate_app->add_option("checkpoint", generate.checkpoint)->required();
  generate_app->add_option("--prompt", generate.prompt);
  generate_app->add_option("--tokens", generate.tokens, "At most so many")->capture_default_str();
  generate_app->add_option("--temperature", generate.sampling.temperature, "0: greedy")->capture_default_str();
  generate_app->add_option("--top-k", generate.sampling.top_k, "0: all");
  generate_app->add_option("--top-p", generate.sampling.top_p)->capture_default_str();
  generate_app->add_option("--seed", generate.sampling.seed)->capture_default_str();
  generate_app->add_option("--vocab", generate.vocab, "For a GPT-2 of Hugging Face");
  generate_app->add_option("--merges", generate.merges, "For a GPT-2 of Hugging Face");
  generate_app->add_option("--threads", generate.threads, "0: all");
  CLI::App* info_app = app.add_subcommand("info", "What a file of weights holds");
  info_app->add_option("file", file)->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (*train_app) {
    train.steps_given = train_app->count("--steps") > 0;
    train.data.seed = train.model.seed = train.train.seed;
    return run_train(train);
  }
  if (*eval_app) return run_eval(eval);
  if (*generate_app) return run_generate(generate);
  return run_info(file);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("heed_lm: there is not enough memory\n", stderr);
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heed_lm: %s\n", error.what());
    return 2;
  }
}
