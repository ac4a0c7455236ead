// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the variants are worth: the same small language model with each of them, trained on the same text in
// the same order, with as many parameters as the largest of them: the MLPs of the others are wider.
//
// Forgetting: with a second text, each model goes on with it for as many steps, and is then asked about the
// first again.

#include "settings.hpp"

#include "../report/plots.hpp"

#include <functional>
#include <map>

namespace compare {

// One variant over all seeds. Losses are of the held-out text, nats per token, one per seed; NaN where training met
// numbers that are not finite and ended before its last step, or the loss itself is none.
struct TrainedVariant {
  std::string name;
  Index parameters = 0, hidden = 0;  // hidden: width of the MLP
  std::vector<double> losses;
  std::vector<double> second, forgotten;  // with a second text: loss on it, and then on the first
  double tokens_per_second = 0;           // median over seeds
  Index skipped = 0;  // steps of all seeds that were not taken, as a number was not finite
  heed_report::Curve curve{100};  // training loss over steps, of the first seed and the first text
  std::map<std::string, double>
      measures;  // learnt scalars and what nn/attention_measures.hpp says, means
                 // over layers, of the last seed after the first text; none where its
                 // loss is not finite

  [[nodiscard]] bool all_finite() const;
};

struct TrainingComparison {
  std::string data;  // one line about the text
  std::vector<TrainedVariant> variants;
};

// Baselines and layers with a memory that --train runs beside the variants.
[[nodiscard]] std::vector<std::string> training_controls();

// on_start(data) before, on_variant(result) after each variant.
[[nodiscard]] TrainingComparison compare_training(
    const Settings& settings, const std::function<void(const std::string&)>& on_start,
    const std::function<void(const TrainedVariant&)>& on_variant);

}  // namespace compare
