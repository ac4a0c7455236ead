// SPDX-License-Identifier: Apache-2.0
#include "model_config.hpp"

#include "../../zoo/layers.hpp"
#include "../../zoo/left_out.hpp"
#include "../program/limits.hpp"
#include "../program/words.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/initialise.hpp>
#include <heed/models/source_stacks.hpp>
#include <heed/mpi/compiled_ranks.hpp>

#include <algorithm>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

// Calls f(member, member of GptOptions with the same meaning) for each member that both have.
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

// The factor by which the MLP of dialectical-lm is wider than the model.
[[nodiscard]] Index dialectical_factor(const ModelConfig& c) {
  return c.hidden > 0 ? std::max<Index>(1, c.hidden / c.width) : 2;
}
[[nodiscard]] Model make_dialectical(const ModelConfig& c) {
  return nn::make_dialectical_lm<float>(c.vocabulary, c.width, c.width / c.heads, c.len,
                                        dialectical_factor(c), {}, c.causal);
}
template <nn::ExtraSource gate>
[[nodiscard]] Model make_qkvi(const ModelConfig& c) {
  return nn::make_qkvi_lm<float>(c.gpt_options(), gate);
}
[[nodiscard]] Model make_ode(const ModelConfig& c) {
  return nn::make_ode_lm<float>(c.gpt_options());
}

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
    auto of_zoo = zoo::attention_by_name(c.variant, c.width, c.heads, layer, c.seed);
    if (of_zoo) return of_zoo;
    return nn::attention_by_name<float>(nn::name_in_block(c.variant, layer, c.depth), c.width,
                                        c.heads, layer, c.prototypes, c.seed);
  });
}

// Width inside the MLP.
[[nodiscard]] Index hidden_of(const ModelConfig& c) {
  if (c.variant == kDialecticalLm) return dialectical_factor(c) * c.width;
  return c.hidden > 0 ? c.hidden : 4 * c.width;
}

[[nodiscard]] Model make_untrained(const ModelConfig& c) {
  const Stack* stack = find_stack(c.variant);
  return stack != nullptr ? stack->make(c) : make_gpt(c);
}

// "attention_dropout" or "--attention-dropout". A setting without an option keeps its name.
[[nodiscard]] std::string name_of(std::string field, Naming naming) {
  if (naming == Naming::fields || field == "vocabulary" || field == "prototypes") return field;
  std::ranges::replace(field, '_', '-');
  return "--" + field;
}

// The settings of a small model of the same kind.
[[nodiscard]] ModelConfig small_of(const ModelConfig& c) {
  ModelConfig small = c;
  small.vocabulary = small.depth = small.len = small.prototypes = 1;
  small.width = 8;
  small.heads = 2;
  small.hidden = 8;
  return small;
}

// The number of rows, each of the model's width, by which a small model of the same kind grows when `size` grows by 1.
[[nodiscard]] Index rows_per(const ModelConfig& c, Index ModelConfig::*size) {
  ModelConfig small = small_of(c);
  const auto numbers = [&] {
    Model model = make_untrained(small);
    Index count = 0;
    const auto add = [&](const std::string&, heed::Param<float>& p, auto&...) {
      count += p.size();
    };
    model.visit(nn::Visitor<float>(add));
    model.visit_state(nn::StateVisitor<float>(add));
    return count;
  };
  const Index before = numbers();
  small.*size += 1;
  return (numbers() - before) / small.width;
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
  for (const std::string& name : zoo::layer_names()) names.push_back(name);
  for (const std::string& name : nn::extra_attention_names()) names.push_back(name);
  for (const std::string& stack : stack_names()) names.push_back(stack);
  return names;
}

void require_variant(const std::string& variant, Naming naming) {
  const std::string called = name_of("variant", naming);
  heed::require(!zoo::reads_later_keys(variant), called, " is ", variant,
                ", which reads later keys by design; a language model must not");
  heed::require(!zoo::is_left_out(variant), called, " is ", variant, ", ", zoo::kLeftOut);
  const std::vector<std::string> names = model_names();
  heed::require(std::ranges::count(names, variant) > 0, called, " is ",
                variant.size() > 80 ? variant.substr(0, 80) + "..." : variant,
                ", it must be one of ", heed_program::joined(names),
                heed_program::did_you_mean(variant, names));
}

bool has_own_frame(const std::string& variant) { return find_stack(variant) != nullptr; }

void require_usable(const ModelConfig& c, Naming naming) {
  const auto called = [naming](const std::string& field) { return name_of(field, naming); };
  const auto at_least = [&](const char* name, Index value, Index least) {
    heed::require(value >= least, called(name), " is ", value, ", it must be at least ", least);
  };
  at_least("vocabulary", c.vocabulary, 1);
  at_least("width", c.width, 1);
  at_least("heads", c.heads, 1);
  at_least("depth", c.depth, 1);
  at_least("len", c.len, 1);
  at_least("hidden", c.hidden, 0);
  at_least("prototypes", c.prototypes, 1);
  for (const auto& [name, value] : {std::pair{"width", c.width},
                                    {"heads", c.heads},
                                    {"depth", c.depth},
                                    {"len", c.len},
                                    {"hidden", c.hidden},
                                    {"prototypes", c.prototypes}})
    heed::require(value <= heed_program::kMaxSize, called(name), " is ", value,
                  ", it must be at most ", heed_program::kMaxSize);
  require_variant(c.variant, naming);
  heed::require(c.width % c.heads == 0, called("width"), " is ", c.width,
                ", it must be a multiple of ", called("heads"), ", ", c.heads);
  for (const auto& [name, part] :
       {std::pair{"dropout", c.dropout}, {"attention_dropout", c.attention_dropout}}) {
    heed::require(part >= 0 && part < 1, called(name), " is ", part, ", it must lie in [0, 1)");
    heed::require(part == 0 || c.variant != kDialecticalLm, called(name), " is ", part, ", ",
                  kDialecticalLm, " has none; it must be 0");
  }
  heed::require(c.init == "gpt2" || c.init == "fan-in", called("init"), " is ",
                c.init.size() > 80 ? c.init.substr(0, 80) + "..." : c.init,
                ", it must be fan-in or gpt2");
  heed::require(c.causal || c.variant == kDialecticalLm,
                naming == Naming::options ? "--no-mask was given" : "causal is false", " for ",
                c.variant, ", only ", kDialecticalLm, " can do without its mask");
}

double least_numbers(const ModelConfig& c) {
  const double width = double(c.width), hidden = double(hidden_of(c));
  // Every block of GPT-2's frame projects its attention's rows with a square matrix.
  const double square = c.variant == kDialecticalLm ? 0 : width;
  const double blocks = c.variant == kDialecticalLm ? 1 : double(c.depth);
  const auto rows = [&](Index ModelConfig::*size) {
    return double(rows_per(c, size)) * double(c.*size);
  };
  return width * (rows(&ModelConfig::vocabulary) + rows(&ModelConfig::len) +
                  blocks * (square + 2 * hidden + rows(&ModelConfig::prototypes)));
}

std::set<std::string> idle_settings(const ModelConfig& c) {
  std::set<std::string> idle;
  const Model model = make_untrained(small_of(c));
  if (rows_per(c, &ModelConfig::prototypes) == 0) idle.insert("prototypes");
  if (!model.counts_steps()) idle.insert("ponder");
  if (!model.scores_steps()) idle.insert("ponder_prior");
  if (c.variant == kDialecticalLm)
    idle.insert({"depth", "dropout", "attention_dropout"});
  else
    idle.insert("causal");
  return idle;
}

LeastBytes least_bytes(const ModelConfig& c, double tokens, bool training) {
  const double blocks = c.variant == kDialecticalLm ? 1 : double(c.depth), width = double(c.width);
  // Rows that every block has (models/transformer_block.hpp): x, its two norms and the residual, the MLP's rows before and
  // behind its activation; in training three gradients. The rows of its attention depend on the variant.
  const double numbers = (training ? 7 : 4) * width + 2 * double(hidden_of(c));
  return {sizeof(float) * (training ? 4 : 1) * least_numbers(c),
          sizeof(float) * tokens * blocks * numbers};
}

Model make_model(const ModelConfig& config, Naming naming) {
  require_usable(config, naming);
  try {
    Model model = make_untrained(config);
    nn::initialise(model, config.seed, nn::first_weights_named(config.init));
    return model;
  } catch (const std::invalid_argument& error) {
    heed::fail(config.variant, " does not fit ", name_of("width", naming), " ", config.width,
               " with ", name_of("heads", naming), " ", config.heads, ", which make a head of ",
               config.width / config.heads, " columns (", error.what(), ")");
  }
}

}  // namespace heed_lm
