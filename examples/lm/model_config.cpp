// SPDX-License-Identifier: Apache-2.0
#include "model_config.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/initialise.hpp>
#include <heed/models/source_stacks.hpp>

#include <algorithm>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

// f(member, the same of GptOptions)
template <class Config, class Options, class F>
void for_each_option(Config& c, Options& o, F&& f) {
  f(c.vocabulary, o.vocabulary);
  f(c.width, o.width);
  f(c.heads, o.heads);
  f(c.depth, o.depth);
  f(c.len, o.max_len);
  f(c.hidden, o.hidden);
  f(c.tied, o.tied);
  f(c.dropout, o.dropout);
  f(c.attention_dropout, o.attention_dropout);
}

[[nodiscard]] Model make_dialectical(const ModelConfig& c) {
  const Index factor = c.hidden > 0 ? std::max<Index>(1, c.hidden / c.width) : 2;
  return nn::make_dialectical_lm<float>(c.vocabulary, c.width, c.width / c.heads, c.len, factor, {},
                                        c.causal);
}
template <nn::ExtraSource gate>
[[nodiscard]] Model make_qkvi(const ModelConfig& c) {
  return nn::make_qkvi_lm<float>(c.gpt_options(), gate);
}
[[nodiscard]] Model make_ode(const ModelConfig& c) { return nn::make_ode_lm<float>(c.gpt_options()); }

struct Stack {
  const char* name;
  Model (*make)(const ModelConfig&);
};
constexpr Stack kStacks[] = {{"qkvi", make_qkvi<nn::ExtraSource::projected>},
                             {"qkvi-from-q", make_qkvi<nn::ExtraSource::from_query>},
                             {"qkvi-calculated", make_qkvi<nn::ExtraSource::calculated>},
                             {"ode-lm", make_ode},
                             {kDialecticalLm, make_dialectical}};

[[nodiscard]] const Stack* find_stack(const std::string& name) {
  const auto* found = std::find_if(std::begin(kStacks), std::end(kStacks),
                                   [&](const Stack& stack) { return name == stack.name; });
  return found == std::end(kStacks) ? nullptr : found;
}

[[nodiscard]] Model make_gpt(const ModelConfig& c) {
  return nn::make_gpt<float>(c.gpt_options(), [&](Index layer) {
    return nn::attention_by_name<float>(c.variant, c.width, c.heads, layer, c.prototypes, c.seed);
  });
}

void require_usable(const ModelConfig& c) {
  const auto at_least = [](const char* name, Index value, Index least) {
    heed::require(value >= least, name, " is ", value, ", it must be at least ", least);
  };
  at_least("vocabulary", c.vocabulary, 1);
  at_least("width", c.width, 1);
  at_least("heads", c.heads, 1);
  at_least("depth", c.depth, 1);
  at_least("len", c.len, 1);
  at_least("hidden", c.hidden, 0);
  for (const auto& [name, part] :
       {std::pair{"dropout", c.dropout}, {"attention_dropout", c.attention_dropout}}) {
    heed::require(part >= 0 && part < 1, name, " is ", part, ", it must lie in [0, 1)");
    heed::require(part == 0 || c.variant != kDialecticalLm, name, " is ", part, ", ", kDialecticalLm,
                  " has none; it must be 0");
  }
  heed::require(c.causal || c.variant == kDialecticalLm, "causal is false for ", c.variant,
                ", only ", kDialecticalLm, " can do without its mask");
}

}  // namespace

void ModelConfig::take(const nn::GptOptions& options) {
  for_each_option(*this, options, [](auto& own, const auto& theirs) { own = theirs; });
}

nn::GptOptions ModelConfig::gpt_options() const {
  nn::GptOptions options;
  for_each_option(*this, options, [](const auto& own, auto& theirs) { theirs = own; });
  options.activation = nn::activation_named(activation);
  return options;
}

std::vector<std::string> stack_names() {
  std::vector<std::string> names;
  for (const Stack& stack : kStacks) names.push_back(stack.name);
  return names;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names = nn::attention_names();
  for (const std::string& name : nn::extra_attention_names()) names.push_back(name);
  for (const std::string& stack : stack_names()) names.push_back(stack);
  return names;
}

bool has_own_frame(const std::string& variant) { return find_stack(variant) != nullptr; }

Model make_model(const ModelConfig& config) {
  require_usable(config);
  const Stack* stack = find_stack(config.variant);
  Model model = stack != nullptr ? stack->make(config) : make_gpt(config);
  nn::initialise(model, config.seed);
  return model;
}

}  // namespace heed_lm
