// SPDX-License-Identifier: Apache-2.0
#pragma once

// Training and evaluation of a run.

#include "checkpoint.hpp"
#include "data_source.hpp"

#include <functional>
#include <stdexcept>
#include <string>

namespace heed_lm {

// Training came to numbers that are not finite and cannot go on.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where a run stands, for those who watch.
struct Report {
  Index step = 0, steps = 0;
  double loss = 0;  // of the last batch, nats per token; of any kind where the step was skipped
  double rate = 0;  // learning rate
  double tokens_per_second = 0, seconds_left = 0;
  bool skipped = false;  // a number of the step was not finite
};

struct Watch {
  Index evaluate_every = 0;  // 0: at the end only
  std::function<void(const Report&)> on_step = {};
  std::function<void(Index step, double loss)> on_evaluation = {};
  std::function<bool()> stop = {};  // asked after every step
  std::function<void()> on_save = {};
  Index save_every = 0;
  std::function<void(const std::string&)> on_fault =
      {};  // one sentence on the first step that is skipped,
           // one on the first save that is left out
};

// Mean loss over all rows that are held out, `batch` at a time.
[[nodiscard]] double evaluate(Model& model, heed::nn::Context<float>& context,
                              const DataSource& data, Index batch);

// So many skipped steps in a row end training.
inline constexpr Index kMostFaults = 10;

// From run.step to run.train.steps, or until asked to stop. Step t is a function of the weights, of
// run.train and of t: a run that was saved and resumed goes on bit for bit.
//
// A step whose loss or gradient is not finite, or that would leave a weight or a moment of the optimiser so,
// is skipped: it counts as done, and weights and moments stay as they were. on_save is called for models alone
// that give held-out rows a finite loss. Throws NotFinite after kMostFaults skipped steps in a row, and when
// the last step or a stop leaves nothing that may be saved or whose loss is finite.
void train(Run& run, const DataSource& data, int threads, const Watch& watch);

}  // namespace heed_lm
