// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/measure/weight_measures.hpp>
#include <heed/nn/cross_entropy.hpp>

#include <cstddef>
#include <numeric>
#include <vector>

namespace heed_lm {

using heed::Index;

// The target of a token that does not count in the loss.
inline constexpr Index kNoTarget = heed::nn::kIgnoreIndex;

// The tokens that one step trains or evaluates on; targets[i] is the token that follows inputs[i].
struct Batch {
  Index rows, len;
  std::vector<Index> inputs, targets;  // (rows, len)
  // Difficulties of a task's targets (tasks/task.hpp), (rows, len); empty for other data.
  std::vector<Index> difficulties = {};
  // Keys of a task for measure_weights(): those that hold the answer of each token that is asked
  // for one, and those of each row on which no answer depends. Empty for other data.
  heed::KeySet sources = {}, noise = {};
  // Number of tokens in front of the padding of each row; empty if rows have no padding.
  std::vector<Index> lengths = {};

  // Sets all inputs to `padding` and all targets to kNoTarget.
  Batch(Index row_count, Index length, Index padding)
      : rows(row_count),
        len(length),
        inputs(std::size_t(row_count * length), padding),
        targets(std::size_t(row_count * length), kNoTarget) {}

  // Number of tokens without padding.
  [[nodiscard]] Index tokens() const {
    return lengths.empty() ? rows * len : std::accumulate(lengths.begin(), lengths.end(), Index(0));
  }
};

// The tokens of a batch in the form that a model takes: its rows, or their tokens without padding,
// one row behind the other.
struct Packing {
  Index batch;
  std::vector<Index> inputs, targets;
  std::vector<Index> starts =
      {};  // first numbers of the packed rows, and the end of the last one; else empty

  // `packs`: rows that end in padding are packed.
  Packing(const Batch& from, bool packs)
      : batch(from.rows), inputs(from.inputs), targets(from.targets) {
    if (!packs || from.lengths.empty()) return;
    batch = 1;
    inputs.clear();
    targets.clear();
    starts.push_back(0);
    for (Index row = 0; row < from.rows; ++row) {
      const auto first = row * from.len, end = first + from.lengths[std::size_t(row)];
      inputs.insert(inputs.end(), from.inputs.begin() + first, from.inputs.begin() + end);
      targets.insert(targets.end(), from.targets.begin() + first, from.targets.begin() + end);
      starts.push_back(heed::Index(inputs.size()));
    }
  }
  // The value of Context::packed in calls on these tokens.
  [[nodiscard]] const std::vector<Index>* packed() const {
    return starts.empty() ? nullptr : &starts;
  }
};

}  // namespace heed_lm
