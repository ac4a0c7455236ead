// SPDX-License-Identifier: Apache-2.0
#include "model_config.hpp"

#include <heed/models/attention_by_name.hpp>
#include <heed/models/gpt.hpp>
#include <heed/models/initialise.hpp>

#include <nlohmann/json.hpp>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

// f(name, member) for everything that is stored.
template <class Config, class F>
void for_each_field(Config& config, F&& f) {
  f("variant", config.variant);
  f("vocabulary", config.vocabulary);
  f("width", config.width);
  f("heads", config.heads);
  f("depth", config.depth);
  f("len", config.len);
  f("hidden", config.hidden);
  f("prototypes", config.prototypes);
  f("tied", config.tied);
  f("causal", config.causal);
  f("activation", config.activation);
  f("dropout", config.dropout);
  f("seed", config.seed);
}

void require_sizes(const ModelConfig& c) {
  const auto at_least = [](const char* name, Index value, Index least) {
    heed::require(value >= least, name, " is ", value, ", it must be at least ", least);
  };
  at_least("vocabulary", c.vocabulary, 1);
  at_least("width", c.width, 1);
  at_least("heads", c.heads, 1);
  at_least("depth", c.depth, 1);
  at_least("len", c.len, 1);
  at_least("hidden", c.hidden, 0);
  heed::require(c.dropout >= 0 && c.dropout < 1, "dropout is ", c.dropout, ", it must lie in [0, 1)");
}

}  // namespace

std::string ModelConfig::json() const {
  nlohmann::json object;
  for_each_field(*this, [&](const char* name, const auto& value) { object[name] = value; });
  return object.dump();
}

ModelConfig ModelConfig::from_json(const std::string& text, const std::string& where) {
  ModelConfig config;
  try {
    const nlohmann::json object = nlohmann::json::parse(text);
    for_each_field(config, [&](const char* name, auto& value) { object.at(name).get_to(value); });
  } catch (const nlohmann::json::exception& error) {
    heed::fail(where, ": its model config cannot be read (", error.what(), ")");
  }
  return config;
}

Model make_model(const ModelConfig& config) {
  require_sizes(config);
  if (config.variant == kDialecticalLm) {
    const Index factor = config.hidden > 0 ? std::max<Index>(1, config.hidden / config.width) : 2;
    Model model = nn::make_dialectical_lm<float>(config.vocabulary, config.width,
                                                 config.width / config.heads, config.len, factor, {},
                                                 config.causal);
    nn::initialise(model, config.seed);
    return model;
  }
  nn::GptOptions options;
  options.vocabulary = config.vocabulary;
  options.width = config.width;
  options.heads = config.heads;
  options.depth = config.depth;
  options.max_len = config.len;
  options.hidden = config.hidden;
  options.tied = config.tied;
  options.dropout = config.dropout;
  options.activation = nn::activation_named(config.activation);
  Model model = nn::make_gpt<float>(options, [&](Index layer) {
    return nn::attention_by_name<float>(config.variant, config.width, config.heads, layer,
                                        config.prototypes, config.seed);
  });
  nn::initialise(model, config.seed);
  return model;
}

}  // namespace heed_lm
