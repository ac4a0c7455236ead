// SPDX-License-Identifier: Apache-2.0
#pragma once

// Training and evaluation of a run.

#include "checkpoint.hpp"
#include "data_source.hpp"

#include <functional>

namespace heed_lm {

// Where a run stands, for those who watch.
struct Report {
  Index step = 0, steps = 0;
  double loss = 0;             // of the last batch, nats per token
  double rate = 0;             // learning rate
  double tokens_per_second = 0, seconds_left = 0;
};

struct Watch {
  Index evaluate_every = 0;                                    // 0: at the end only
  std::function<void(const Report&)> on_step = {};
  std::function<void(Index step, double loss)> on_evaluation = {};
  std::function<bool()> stop = {};                             // asked after every step
  std::function<void()> on_save = {};
  Index save_every = 0;
};

// Mean loss over all rows that are held out, `batch` at a time.
[[nodiscard]] double evaluate(Model& model, heed::nn::Context<float>& context, const DataSource& data,
                              Index batch);

// From run.step to run.train.steps, or until asked to stop. Step t is a function of the weights, of
// run.train and of t: a run that was saved and resumed goes on bit for bit.
void train(Run& run, const DataSource& data, int threads, const Watch& watch);

}  // namespace heed_lm
