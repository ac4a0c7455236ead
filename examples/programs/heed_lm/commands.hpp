// SPDX-License-Identifier: Apache-2.0
#pragma once

// The five commands of heed_lm.

#include "data_source.hpp"
#include "generation.hpp"
#include "training.hpp"

#include <map>
#include <optional>
#include <string>

namespace heed_lm {

struct TrainCommand {
  DataSettings data;
  ModelConfig model{.init = "fan-in"};
  TrainSettings train;
  std::string out, resume, gpt2;
  bool overwrite = false;  // replaces an `out` that is no checkpoint of this run
  std::string report;      // folder for the page of pictures; empty: none
  Index evaluate_every = 100, save_every = 500;
  int threads = 0;
  double rank_timeout = 0;          // seconds; 0: none
  Index context_ranks = 1;          // ranks that share the tokens of a sequence
  std::string program = "heed_lm";  // name with which the program was called
  std::map<std::string, std::string>
      given;  // options of the command line, unchanged: "--batch", "32"
};

struct EvalCommand {
  DataSettings data;
  std::string checkpoint;
  Index batch = 16;
  int threads = 0;
};

struct GenerateCommand {
  std::string checkpoint, vocab, merges;
  std::optional<std::string> prompt;  // none: text_start() of the tokenizer
  std::string end_of_text;            // see end_of_text_named()
  bool stop_at_end = false;
  Index tokens = 200;
  Sampling sampling;
  int threads = 0;
};

struct InspectCommand {
  std::string checkpoint, vocab, merges, prompt, end_of_text;
  std::optional<Index> layer, head;  // counted from 0; none: all
  Index top = 3;                     // links of each token
  std::string json, report;          // a file or "-", a folder; empty: none
  int threads = 0;
};

// Each returns the exit code, and throws if it cannot do its work.
// Several ranks share the batches of training, and with context_ranks the tokens of their
// sequences; only the first one prints and writes files.
int run_train(TrainCommand command, heed_program::Ranks& ranks);
int run_eval(const EvalCommand& command);
int run_generate(const GenerateCommand& command);
int run_inspect(const InspectCommand& command);
int run_info(const std::string& file);

}  // namespace heed_lm
