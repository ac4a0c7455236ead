// SPDX-License-Identifier: Apache-2.0
#include "task.hpp"

#include <heed/core/error.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>

namespace tasks {

std::vector<Index> positions_without(Index begin, Index end, std::vector<Index> others) {
  std::sort(others.begin(), others.end());
  std::vector<Index> all(std::size_t(end - begin)), rest;
  std::iota(all.begin(), all.end(), begin);
  std::set_difference(all.begin(), all.end(), others.begin(), others.end(),
                      std::back_inserter(rest));
  return rest;
}

Batch Task::batch(Place place, Index rows) const {
  heed::require(rows >= 1, "Task::batch: rows is ", rows, ", it must be at least 1");
  std::vector<Sequence> sequences;
  Batch batch;
  batch.rows = rows;
  for (Index row = 0; row < rows; ++row, ++place.index) {
    sequences.push_back(sequence(place));
    batch.len = std::max(batch.len, Index(sequences.back().inputs.size()));
  }
  batch.inputs.assign(std::size_t(rows * batch.len), padding());
  batch.targets.assign(std::size_t(rows * batch.len), kNoAnswer);
  for (Index row = 0; row < rows; ++row) {
    Sequence& one = sequences[std::size_t(row)];
    const auto inputs = batch.inputs.begin() + row * batch.len;
    const auto targets = batch.targets.begin() + row * batch.len;
    std::copy(one.inputs.begin(), one.inputs.end(), inputs);
    for (const Answer& answer : one.answers) targets[answer.position] = answer.token;
    for (Index t = Index(one.inputs.size()); t < batch.len && padding_target() != kNoAnswer; ++t) {
      targets[t] = padding_target();
      one.answers.push_back({t, padding_target(), 0, 0, 0});
    }
    batch.answers.push_back(std::move(one.answers));
    batch.noise.push_back(std::move(one.noise));
  }
  return batch;
}

}  // namespace tasks
