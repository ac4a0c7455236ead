// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures which tokens the tokens of sequences read, in each layer and head of a model.

#include "model_config.hpp"

#include <heed/measure/weight_measures.hpp>

#include <span>
#include <vector>

namespace heed_lm {

// Runs the model on `batch` sequences of ids, one below the other, and returns the measures of each block. Throws
// std::runtime_error for a block whose attention is neither the library's nor the zoo's.
[[nodiscard]] std::vector<heed::WeightMeasures> read_layers(Model& model,
                                                            heed::nn::Context<float>& context,
                                                            Index batch, std::span<const Index> ids,
                                                            const heed::WeightRequest& request);

// Means over the tokens of a head that read something.
struct HeadReading {
  Index layer, head;
  double entropy, top_weight, distance;  // top_weight: size of the largest weight
};
[[nodiscard]] HeadReading head_reading(const std::vector<heed::WeightMeasures>& layers, Index layer,
                                       Index head);

}  // namespace heed_lm
