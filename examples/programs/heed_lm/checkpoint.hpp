// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run of training as a safetensors file: the weights by their names, AdamW's moments as adamw.first.<name> and
// adamw.second.<name>, and in the metadata the model's settings, the tokenizer and the number of steps done. A file is
// replaced as a whole or not at all.

#include "model_config.hpp"
#include "tokenizer.hpp"

#include <heed/nn/adamw.hpp>
#include <heed/nn/ponder_attention.hpp>
#include <heed/simd/precision.hpp>

#include <filesystem>
#include <memory>
#include <optional>

namespace heed_lm {

// The names of heed::Precision in settings. Weights, gradients and moments are floats with both.
inline constexpr const char *kFloat = "float", *kMixed = "mixed";
// The precision of that name; none for another name.
[[nodiscard]] std::optional<heed::Precision> precision_of(const std::string& name);

// The settings of training, which a resumed run keeps.
struct TrainSettings {
  Index batch = 16, steps = 1000, warmup = 100;
  Index len = 0;  // tokens of a sequence; 0: the model's number
  double learning_rate = 1e-3, weight_decay = 0.1, clip = 1.0;
  double ponder = 0;  // cost of a step, for attention that counts its steps
  double ponder_prior =
      heed::nn::kPonderPrior;  // for models that have one (nn/ponder_attention.hpp)
  std::uint64_t seed = 1;
  std::string precision = kFloat;  // precision of large products: kFloat or kMixed

  template <class Self, class F>
  static void for_each_field(Self& s, F&& f) {
    f("batch", s.batch);
    f("steps", s.steps);
    f("warmup", s.warmup);
    f("len", s.len);
    f("learning_rate", s.learning_rate);
    f("weight_decay", s.weight_decay);
    f("clip", s.clip);
    f("ponder", s.ponder);
    f("ponder_prior", s.ponder_prior);
    f("seed", s.seed);
    f("precision", s.precision);
  }
};

struct Run {
  ModelConfig config;
  TrainSettings train;
  Index step = 0, skipped = 0;  // steps done, and steps among them that the optimiser skipped
  std::uint64_t data = 0;       // fingerprint of the training data
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<Model> model;
  heed::nn::AdamW<float> optimiser;
};

// Writes the run. If one of its numbers is not finite, throws std::runtime_error and does not touch the file.
void save_run(Run& run, const std::filesystem::path& path);
// Throws std::runtime_error or std::invalid_argument with one sentence that begins with the path.
[[nodiscard]] Run load_run(const std::filesystem::path& path);

// A run that starts from a GPT-2 of Hugging Face, with any variant that fits into its frame. Sizes and activation come from
// the file, not from `config`. `tokenizer` must have as many words as the file, or up to 1023 fewer.
[[nodiscard]] Run run_from_gpt2(const std::filesystem::path& path, ModelConfig config,
                                std::shared_ptr<const Tokenizer> tokenizer);
[[nodiscard]] bool is_gpt2_file(const std::filesystem::path& path);

}  // namespace heed_lm
