// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the variants are worth: the same small language model with each of them, trained on the same text in
// the same order, with as many parameters as the largest of them: the MLPs of the others are wider.

#include "settings.hpp"

#include <map>

namespace compare {

// One variant over all seeds.
struct TrainedVariant {
  std::string name;
  Index parameters = 0, hidden = 0;     // hidden: width of the MLP
  std::vector<double> losses;           // validation, one per seed, nats per token
  double tokens_per_second = 0;         // median over seeds
  std::map<std::string, double> reports;  // learnt scalars and the op's diagnostics, means over layers, of
                                          // the last seed
};

struct TrainingComparison {
  std::string data;                     // one line about the text
  std::vector<TrainedVariant> variants;
};

[[nodiscard]] TrainingComparison compare_training(const Settings& settings);
// Tables on standard output; JSON and CSV where asked for.
void write_training(const Settings& settings, const TrainingComparison& comparison);

}  // namespace compare
