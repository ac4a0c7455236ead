// SPDX-License-Identifier: Apache-2.0
#include "reading.hpp"

#include "../../zoo/layers.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_weights.hpp>
#include <heed/mpi/compiled_ranks.hpp>

#include <cmath>
#include <stdexcept>
#include <string>

namespace heed_lm {

namespace nn = heed::nn;

std::vector<heed::WeightMeasures> read_layers(Model& model, nn::Context<float>& context,
                                              Index batch, std::span<const Index> ids,
                                              const heed::WeightRequest& request) {
  // The loss computes the head a chunk of tokens at a time; its value is not used here.
  (void)model.loss(context, batch, ids, ids);
  std::vector<heed::WeightMeasures> layers;
  for (auto& block : model.blocks()) {
    auto measures = zoo::weights_of(block.attention(), context, batch, request);
    if (!measures) measures = nn::weights_of(block.attention(), context, batch, request);
    if (!measures)
      throw std::runtime_error("the attention of layer " + std::to_string(layers.size()) +
                               " is none whose weights can be measured");
    layers.push_back(std::move(*measures));
  }
  return layers;
}

HeadReading head_reading(const std::vector<heed::WeightMeasures>& layers, Index layer, Index head) {
  const heed::WeightMeasures& m = layers[std::size_t(layer)];
  std::vector<double> tops;
  for (Index row = 0; row < m.rows(); ++row) tops.push_back(std::abs(m.links_of(row)[0].weight));
  return {layer, head, m.mean(m.entropy, head), m.mean(tops, head), m.mean(m.distance, head)};
}

}  // namespace heed_lm
