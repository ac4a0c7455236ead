// SPDX-License-Identifier: Apache-2.0
#pragma once

// Training and evaluation of a run.

#include "../program/ranks.hpp"
#include "checkpoint.hpp"
#include "data_source.hpp"

#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

namespace heed_lm {

// Thrown when training has led to numbers that are not finite, and cannot go on.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown when a pass of a model is left early because the run is to stop.
struct PassStopped {};

// Largest possible mean loss of a model, in nats per token. A larger loss, or one that is not finite, comes from a model
// that has led to numbers that are not finite, or from a damaged one, whose tokens had probabilities below 2^-149, which a
// float cannot hold. A guess among a million tokens has 13.8.
inline constexpr double kLargestLoss = 103.3;
[[nodiscard]] inline bool is_possible_loss(double loss) {
  return std::isfinite(loss) && loss <= kLargestLoss;
}
// The fault of a larger loss: the end of a sentence that begins with "the loss".
[[nodiscard]] std::string loss_fault(double loss);

// The state of a run after a step, for Watch::on_step.
struct Report {
  Index step = 0, steps = 0;
  double loss = 0;  // nats per token of the last batch; may be any number if the step was skipped
  double rate = 0;  // learning rate
  double tokens_per_second = 0;  // mean of the run so far, with its evaluations and saves
  double seconds_left = 0;
  Index step_tokens = 0;    // tokens of this step
  double step_seconds = 0;  // from the draw of this step's batch to the new weights
  bool skipped = false;     // true if a number of the step was not finite
};

// The answers of a model to all held-out rows. An answer is right if it is the likeliest token.
struct Score {
  double loss = 0, accuracy = 0;  // means over the targets; loss in nats per token
  Index answers = 0;              // number of targets; 0 where no row is held out
  struct Part {
    Index answers = 0, right = 0;
    // Reports of the attention on the tokens at these answers (steps, tension), by name: sums over
    // the answers of the mean over the blocks that report it.
    std::map<std::string, double> reports;
  };
  std::map<Index, Part> by_difficulty;  // empty for data whose targets have none
};

// Computes `batch` rows at a time. Several ranks share these batches; the score has the same bits for any number of them.
// If context.before_product throws PassStopped on one rank, all ranks throw it.
[[nodiscard]] Score score(Model& model, heed::nn::Context<float>& context, const DataSource& data,
                          Index batch, heed_program::Ranks* ranks = nullptr);

// Functions that train() calls. Each may be empty.
struct Watch {
  Index evaluate_every = 0;  // 0: at the end only
  std::function<void(const Report&)> on_step = {};
  std::function<void(Index step, const Score& held_out)> on_evaluation = {};
  std::function<bool()> stop = {};  // asked after every step
  // Called again and again in a step and an evaluation; these are abandoned if it returns true, so that a step of hours
  // does not keep a run from ending. Steps of sequences that ranks share (context_ranks) are taken to their end.
  std::function<bool()> stop_now = {};
  std::function<void()> on_save = {};
  Index save_every = 0;
  std::function<void(const std::string&)> on_fault =
      {};  // one sentence on the first step that is skipped,
           // one on the first save that is left out
};

// The number of skipped steps in a row at which training ends.
inline constexpr Index kMostFaults = 10;

// Trains from run.step to run.train.steps, or until watch.stop() or stop_now() asks to stop. Step t is a function of the
// weights, of run.train and of t alone: a run that was saved and resumed goes on bit for bit, and a step that is abandoned
// leaves no trace. If no row is held out, scores have no answers, and training rows tell whether a model is sound.
//
// A step is skipped if its loss or gradient is not finite, or if a weight or a moment of the optimiser would not be finite
// after it: it counts as done, and weights and moments do not change. on_save is called only for models that give held-out
// rows a possible loss. Throws NotFinite after kMostFaults skipped steps in a row, and if held-out rows have no possible
// loss after the last step or at a stop.
//
// Several ranks share each batch: rank r of n computes its rows [r rows / n, (r + 1) rows / n), with the random numbers
// that these rows have in the whole batch, and the gradients are added up in the order of the ranks. The order of the data
// does not depend on n: a run may be resumed on another number of ranks and sees the same batches. The bits are the same
// for the same n; for another n, gradients differ as sums of floats do. With `context_ranks` c, groups of c neighbouring
// ranks take the place of single ranks, and each rank of a group has a shard of the tokens of every row; evaluation is
// shared by whole rows, as without groups. All ranks call all functions of `watch`, with the same numbers except for times.
// Throws std::invalid_argument if ranks or their groups outnumber the rows of a batch, if the model has a memory that
// learns a batch's keys one after another, if rows are too short for so many context_ranks, and if ranks differ in weights,
// settings or data.
void train(Run& run, const DataSource& data, int threads, const Watch& watch,
           heed_program::Ranks* ranks = nullptr, int context_ranks = 1);

}  // namespace heed_lm
