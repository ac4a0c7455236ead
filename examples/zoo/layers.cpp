// SPDX-License-Identifier: Apache-2.0
#include "layers.hpp"

#include "dsa.hpp"
#include "left_out.hpp"
#include "nsa.hpp"
#include "zoo.hpp"

#include <heed/models/attention_by_name.hpp>
#include <heed/mpi/compiled_ranks.hpp>

namespace zoo {

namespace nn = heed::nn;

namespace {

// Layers of more than one call, which are no variants: f(name, make), make(options) makes the layer.
template <class F>
void for_each_own_layer(F&& f) {
  if (variant_names().empty()) return;  // left out
  f("zoo:dsa", [](const nn::AttentionOptions& o) -> std::unique_ptr<nn::AttentionLayer<float>> {
    return std::make_unique<dsa::Layer<float>>(o);
  });
  f("zoo:nsa", [](const nn::AttentionOptions& o) -> std::unique_ptr<nn::AttentionLayer<float>> {
    return std::make_unique<nsa::Layer<float>>(o);
  });
}

}  // namespace

std::unique_ptr<nn::AttentionLayer<float>> attention_by_name(const std::string& name,
                                                             heed::Index width, heed::Index heads,
                                                             heed::Index layer,
                                                             std::uint64_t seed) {
  std::unique_ptr<nn::AttentionLayer<float>> made;
  const nn::AttentionOptions even = nn::AttentionOptions::even(width, heads);
  for_each_zoo_variant<float>(even.heads,
                              [&](const auto& variant) {
                                if (name == variant.name) made = nn::attention_of(variant, even);
                              },
                              {.seed = seed + std::uint64_t(layer), .depth = layer + 1});
  for_each_own_layer([&](const std::string& own, const auto& make) {
    if (name == own) made = make(even);
  });
  return made;
}

std::optional<std::vector<nn::Measure>> measures_of(const nn::AttentionLayer<float>& layer,
                                                    heed::Index batch, heed::Index sequences,
                                                    const nn::ChosenTokens& chosen) {
  std::optional<std::vector<nn::Measure>> measures;
  for_each_zoo_variant<float>(heed::kSmallSizes, [&]<class Op>(const heed::Variant<Op>&) {
    if (measures) return;
    if (const auto* projected = dynamic_cast<const nn::ProjectedAttention<Op>*>(&layer))
      measures = nn::measures_of(*projected, batch, sequences, chosen);
  });
  return measures;
}

bool reads_later_keys(const std::string& name) {
  bool reads = false;
  for_each_zoo_variant<float>(heed::kSmallSizes, [&](const auto& variant) {
    if (name == variant.name) reads = variant.traits.reads_later_keys;
  });
  return reads;
}

bool is_left_out(const std::string& name) {
  return layer_names().empty() && (name == "zoo" || name.starts_with("zoo:"));
}

std::vector<std::string> layer_names() {
  std::vector<std::string> names = variant_names();
  std::erase_if(names, reads_later_keys);
  for_each_own_layer([&](const char* own, const auto&) { names.push_back(own); });
  return names;
}

}  // namespace zoo
