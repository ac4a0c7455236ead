// SPDX-License-Identifier: Apache-2.0
#pragma once

// A cell of an experiment: one model, trained once; its name and its results.

#include "../heed_compare/settings.hpp"

#include "../heed_lm/training.hpp"
#include "../report/plots.hpp"

#include <limits>
#include <map>

namespace compare {

inline constexpr double kNotFinite = std::numeric_limits<double>::quiet_NaN();

struct Cell {
  std::string task;  // spec of the task, or kText
  std::string variant;
  Index hidden = 0;  // width of the MLP
  double learning_rate = 0;
  std::uint64_t seed = 1;
  bool chooses =
      false;  // serves the choice of a learning rate, and is scored on the watched rows alone

  [[nodiscard]] bool operator==(const Cell&) const = default;

  template <class Self, class F>
  static void for_each_field(Self& c, F&& f) {
    f("task", c.task);
    f("variant", c.variant);
    f("hidden", c.hidden);
    f("learning_rate", c.learning_rate);
    f("seed", c.seed);
    f("chooses", c.chooses);
  }
};

// The cell's name for people: "dar, mqar, learning rate 0.002, seed 3".
[[nodiscard]] std::string name_of(const Cell& cell);

// A score of the model. `test` is kHeldOut, kWatched, or the name of a test. Loss and accuracy are
// NaN if the loss is not finite.
inline constexpr const char *kHeldOut = "held out", *kWatched = "watched";
struct TestScore {
  std::string test;
  heed_lm::Score score;
};

// The score on the watched rows after a number of steps.
struct Evaluation {
  Index step = 0;
  double loss = 0, accuracy = 0;
};

// The score on the data of stage `on`, after stage `after`; both count from 0.
struct StageScore {
  Index after = 0, on = 0;
  double loss = 0, accuracy = 0;
};

// The course of the training loss.
struct TrainingCurve {
  std::vector<double> step, loss;
  Index steps_per_point = 1;
};

// Measures by their names.
using Measures = std::map<std::string, double>;

struct CellResult {
  Index parameters = 0;
  Index skipped = 0;             // steps skipped because a number was not finite
  double tokens_per_second = 0;  // speed in the first stage, without evaluations
  std::vector<TestScore> tests;  // held out first; after the first stage
  std::vector<Evaluation> course;
  std::vector<StageScore> stages;  // empty with one stage
  TrainingCurve curve;             // losses of the first stage
  // Measures on the first held-out rows after the first stage, means over layers: over all tokens, over tokens that are
  // asked for an answer, over the others. Empty if the loss is not finite; the last two only for tasks.
  Measures measures, at_answers, elsewhere;
  std::optional<heed_report::Picture> reading;  // reading_picture.hpp, of the first seed
};

// The first step of the course with an accuracy of 90 % or more; none without such a step.
[[nodiscard]] std::optional<Index> steps_to_90(const CellResult& result);

// The score of the test; throws std::out_of_range if the test was not made.
[[nodiscard]] const heed_lm::Score& score_of(const CellResult& result, const std::string& test);

// The effect of later stages on earlier ones: the mean of score(after the last stage, on j) -
// score(after j, on j) over all stages j but the last (Lopez-Paz and Ranzato 2017, "Gradient
// Episodic Memory", equation 3). A value below 0 for accuracy means forgetting.
[[nodiscard]] double backward_transfer(const CellResult& result, double StageScore::*score);

// The score on stage `on` after stage `after`.
[[nodiscard]] const StageScore& stage_of(const CellResult& result, Index after, Index on);

}  // namespace compare
