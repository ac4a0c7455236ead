// SPDX-License-Identifier: Apache-2.0
#pragma once

// A cell of an experiment: one model, trained once. What names it, and what came of it.

#include "../heed_compare/settings.hpp"

#include "../heed_lm/training.hpp"
#include "../report/plots.hpp"

#include <limits>
#include <map>

namespace compare {

inline constexpr double kNotFinite = std::numeric_limits<double>::quiet_NaN();

struct Cell {
  std::string task;  // its spec, or kText
  std::string variant;
  Index hidden = 0;  // width of the MLP
  double learning_rate = 0;
  std::uint64_t seed = 1;
  bool chooses =
      false;  // serves to choose a learning rate, and is scored on the watched rows alone

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

// For people: "dar, mqar, learning rate 0.002, seed 3".
[[nodiscard]] std::string name_of(const Cell& cell);

// What the model answered. `test` is kHeldOut, kWatched, or the name of a test. Loss and accuracy are NaN where the loss is
// not finite.
inline constexpr const char *kHeldOut = "held out", *kWatched = "watched";
struct TestScore {
  std::string test;
  heed_lm::Score score;
};

// The score on the watched rows after so many steps.
struct Evaluation {
  Index step = 0;
  double loss = 0, accuracy = 0;
};

// The score on what was trained on in stage `on`, after stage `after`; both count from 0.
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
  Index skipped = 0;             // steps that were skipped because a number was not finite
  double tokens_per_second = 0;  // of the first stage, without evaluations
  std::vector<TestScore> tests;  // held out first; after the first stage
  std::vector<Evaluation> course;
  std::vector<StageScore> stages;  // none where there is one stage
  TrainingCurve curve;             // of the first stage
  // Of the first held-out rows after the first stage, means over layers: of all tokens, of those that are asked for an
  // answer, of the others. None where the loss is not finite; the last two only for tasks.
  Measures measures, at_answers, elsewhere;
  std::optional<heed_report::Picture> reading;  // reading_picture.hpp, of the first seed
};

// The first step of the course with an accuracy of 90 % or more; none if there was none.
[[nodiscard]] std::optional<Index> steps_to_90(const CellResult& result);

// The score of the test; throws std::out_of_range for a test that was not made.
[[nodiscard]] const heed_lm::Score& score_of(const CellResult& result, const std::string& test);

// What later stages did to earlier ones: the mean of score(after the last stage, on j) - score(after j, on j) over all stages
// j but the last (Lopez-Paz and Ranzato 2017, "Gradient Episodic Memory", equation 3). Accuracy below 0 is forgetting.
[[nodiscard]] double backward_transfer(const CellResult& result, double StageScore::*score);

// The score on stage `on` after stage `after`.
[[nodiscard]] const StageScore& stage_of(const CellResult& result, Index after, Index on);

}  // namespace compare
