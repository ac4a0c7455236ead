// SPDX-License-Identifier: Apache-2.0
#pragma once

// The four commands of heed_lm.

#include "data_source.hpp"
#include "generation.hpp"
#include "training.hpp"

#include <string>

namespace heed_lm {

struct TrainCommand {
  DataSettings data;
  ModelConfig model;
  TrainSettings train;
  std::string out, resume, gpt2;
  std::string report;  // folder for the page of pictures; empty: none
  Index evaluate_every = 100, save_every = 500;
  int threads = 0;
  bool steps_given = false;  // a resumed run may be told to go on for longer
};

struct EvalCommand {
  DataSettings data;
  std::string checkpoint;
  Index batch = 16;
  int threads = 0;
};

struct GenerateCommand {
  std::string checkpoint, prompt = "\n", vocab, merges;
  Index tokens = 200;
  Sampling sampling;
  int threads = 0;
};

// Each returns the exit code; what cannot be done is thrown.
int run_train(TrainCommand command);
int run_eval(const EvalCommand& command);
int run_generate(const GenerateCommand& command);
int run_info(const std::string& file);

}  // namespace heed_lm
