// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers around the zoo's variants, by name.

#include <heed/measure/weight_measures.hpp>
#include <heed/models/attention_measures.hpp>
#include <heed/nn/attention_layer.hpp>

#include <memory>
#include <optional>
#include <string>

namespace zoo {

// The causal layer `name` in the frame of all variants (heed/models/attention_by_name.hpp) for layer `layer` (from 0) of a
// model; null for a name that is not of the zoo.
[[nodiscard]] std::unique_ptr<heed::nn::AttentionLayer<float>> attention_by_name(
    const std::string& name, heed::Index width, heed::Index heads, heed::Index layer,
    std::uint64_t seed);

// The measures of a layer around a variant of the zoo (heed/models/attention_measures.hpp), for all
// tokens or for some; none for other layers.
[[nodiscard]] std::optional<std::vector<heed::nn::Measure>> measures_of(
    const heed::nn::AttentionLayer<float>& layer, heed::Index batch, heed::Index sequences = 2,
    const heed::nn::ChosenTokens& chosen = {});

// Measures which tokens the tokens of the layer's last forward() read
// (heed/models/attention_weights.hpp); none for other layers.
[[nodiscard]] std::optional<heed::WeightMeasures> weights_of(
    const heed::nn::AttentionLayer<float>& layer, const heed::nn::Context<float>& context,
    heed::Index batch, const heed::WeightRequest& request);

// True for a variant of the zoo whose mask shows later keys. It has no causal layer.
[[nodiscard]] bool reads_later_keys(const std::string& name);

// The variants that have a layer.
[[nodiscard]] std::vector<std::string> layer_names();

}  // namespace zoo
