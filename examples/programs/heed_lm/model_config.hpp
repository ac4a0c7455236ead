// SPDX-License-Identifier: Apache-2.0
#pragma once

// The settings from which a model is made, as command lines and checkpoints have them.

#include <heed/models/gpt.hpp>

#include <set>
#include <string>
#include <vector>

namespace heed_lm {

using heed::Index;
using Model = heed::nn::LanguageModel<float>;

// The source's one-block model.
inline constexpr const char* kDialecticalLm = "dialectical-lm";

struct ModelConfig {
  std::string variant = "sdpa";  // a name of model_names()
  Index vocabulary = 0, width = 256, heads = 4, depth = 4, len = 256;
  Index hidden = 0;  // width of the MLP; 0: four times the width, dialectical-lm twice
  Index prototypes = 16;
  bool tied = true, causal = true;
  std::string activation = "gelu";
  std::string init = "gpt2";     // name for nn::first_weights_named(); "gpt2" for files without it
  double dropout = 0;            // rate for the embeddings and for what each block adds
  double attention_dropout = 0;  // rate for the attention's weights
  std::uint64_t seed = 1;        // seed of the first weights

  template <class Self, class F>
  static void for_each_field(Self& c, F&& f) {
    f("variant", c.variant);
    f("vocabulary", c.vocabulary);
    f("width", c.width);
    f("heads", c.heads);
    f("depth", c.depth);
    f("len", c.len);
    f("hidden", c.hidden);
    f("prototypes", c.prototypes);
    f("tied", c.tied);
    f("causal", c.causal);
    f("activation", c.activation);
    f("init", c.init);
    f("dropout", c.dropout);
    f("attention_dropout", c.attention_dropout);
    f("seed", c.seed);
  }

  // Copies the settings shared with a GPT-2 stack, except for the activation, from or to its options.
  void take(const heed::nn::GptOptions& options);
  [[nodiscard]] heed::nn::GptOptions gpt_options() const;
};

// stack_names() lists the stacks that have a frame of their own; model_names() lists the attentions that fit into
// GPT-2's frame, then those stacks.
[[nodiscard]] std::vector<std::string> stack_names();
[[nodiscard]] std::vector<std::string> model_names();
[[nodiscard]] bool has_own_frame(const std::string& variant);

// The form of a setting's name in messages: attention_dropout as in checkpoints, or
// --attention-dropout as on command lines.
enum class Naming { fields, options };

// Throws std::invalid_argument for a variant that a language model cannot have.
void require_variant(const std::string& variant, Naming naming);

// Throws std::invalid_argument unless each setting can be used; makes nothing.
void require_usable(const ModelConfig& config, Naming naming = Naming::fields);
// Lower bound on the numbers that a model of usable settings holds, weights and the state of
// layers. The model is not made; it holds at most 16 times as many.
[[nodiscard]] double least_numbers(const ModelConfig& config);

// The names of the settings, of a model and of its training, that a model of this variant does not read.
[[nodiscard]] std::set<std::string> idle_settings(const ModelConfig& config);

// Lower bounds on the bytes of a process that computes this many tokens at a time: for weights, and for the rows that
// blocks keep per token. In training, weights have gradients and two moments, and tokens gradients.
struct LeastBytes {
  double weights, tokens;
  [[nodiscard]] double all() const { return weights + tokens; }
};
[[nodiscard]] LeastBytes least_bytes(const ModelConfig& config, double tokens, bool training);

// A model with its first weights. Throws std::invalid_argument if the settings do not fit together.
[[nodiscard]] Model make_model(const ModelConfig& config, Naming naming = Naming::fields);

}  // namespace heed_lm
