// SPDX-License-Identifier: Apache-2.0
#pragma once

// An experiment: the data of each task, and the model that each variant trains on it. The MLP of
// plain attention's model is four times as wide as the model; the MLPs of all others have the width
// that gives them as many parameters, whichever variants run.

#include "cell.hpp"
#include "cell_folder.hpp"

#include <memory>

namespace compare {

// The names of the controls that --train runs beside the variants: baselines, and layers with a memory.
[[nodiscard]] std::vector<std::string> training_controls();

// prototype-art whose memory learns in the first stage only, or never: controls of experiments of several stages.
inline constexpr const char *kFrozenMemory = "prototype-art-frozen",
                            *kNoMemory = "prototype-art-off";

class Experiment {
 public:
  using Source = std::shared_ptr<const heed_lm::DataSource>;

  // Rows on which a trained model is scored, and the noise added to its queries and keys (nn/noise.hpp).
  struct Test {
    std::string name;
    Source source;
    double noise = 0;
  };
  struct Task {
    std::string spec;  // or kText
    std::string data;  // one line for people
    Index vocabulary = 0;
    std::function<std::string(Index)> token_name;
    Index positions = 0;         // tokens of the longest sequence of training and tests
    std::vector<Source> stages;  // training data, one stage after another
    // Rows that choose a learning rate and show when a model has learnt its task. No test has them.
    Source watched;
    Index evaluate_every = 0;  // steps between two scores on the watched rows; 0: none
    std::vector<Test> tests;   // held out first
  };

  // Throws UsageError if a text, a task or the sizes cannot be used.
  explicit Experiment(const Settings& settings);

  [[nodiscard]] const Settings& settings() const { return settings_; }
  [[nodiscard]] const std::vector<Task>& tasks() const { return tasks_; }
  [[nodiscard]] const Task& task(const std::string& spec) const;

  // The width of the variant's MLP.
  [[nodiscard]] Index hidden_of(const std::string& variant) const { return hidden_.at(variant); }
  [[nodiscard]] heed_lm::ModelConfig config_of(const Cell& cell) const;

  // Settings that all cells share, for --out.
  [[nodiscard]] SharedSettings shared_settings() const;

 private:
  [[nodiscard]] Task open_task(const std::string& spec);
  [[nodiscard]] Task open_text();
  void match_parameters();

  const Settings& settings_;
  std::vector<Task> tasks_;
  std::map<std::string, Index> hidden_;  // width of each variant's MLP
  std::vector<std::string> texts_;       // the texts' contents as numbers; empty if no text is read
};

}  // namespace compare
