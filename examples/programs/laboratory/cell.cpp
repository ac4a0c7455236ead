// SPDX-License-Identifier: Apache-2.0
#include "cell.hpp"

#include "../heed_compare/print.hpp"

#include "../tasks/task_list.hpp"

#include <algorithm>

namespace compare {

std::string name_of(const Cell& cell) {
  return cell.variant + ", " + tasks::task_name(cell.task) +
         print(", learning rate %g, seed %llu", cell.learning_rate,
               static_cast<unsigned long long>(cell.seed));
}

std::optional<Index> steps_to_90(const CellResult& result) {
  for (const Evaluation& evaluation : result.course)
    if (evaluation.accuracy >= 0.9) return evaluation.step;
  return std::nullopt;
}

const heed_lm::Score& score_of(const CellResult& result, const std::string& test) {
  for (const TestScore& one : result.tests)
    if (one.test == test) return one.score;
  throw std::out_of_range("there is no test \"" + test + "\"");
}

double backward_transfer(const CellResult& result, double StageScore::*score) {
  const Index last = result.stages.back().after;
  double sum = 0;
  for (Index j = 0; j < last; ++j)
    sum += stage_of(result, last, j).*score - stage_of(result, j, j).*score;
  return sum / double(last);
}

const StageScore& stage_of(const CellResult& result, Index after, Index on) {
  for (const StageScore& stage : result.stages)
    if (stage.after == after && stage.on == on) return stage;
  throw std::out_of_range("there is no stage " + std::to_string(after) + ", " + std::to_string(on));
}

}  // namespace compare
