// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a model is made from, as the command line and checkpoints have it.

#include <heed/models/language_model.hpp>

#include <string>

namespace heed_lm {

using heed::Index;
using Model = heed::nn::LanguageModel<float>;

// The source's one-block model beside the GPT-2 stack with any variant.
inline constexpr const char* kDialecticalLm = "dialectical-lm";

struct ModelConfig {
  std::string variant = "sdpa";  // of attention_names(), or dialectical-lm
  Index vocabulary = 0, width = 256, heads = 4, depth = 4, len = 256;
  Index hidden = 0;              // of the MLP; 0: four times the width, dialectical-lm twice
  Index prototypes = 16;
  bool tied = true, causal = true;
  std::string activation = "gelu";
  double dropout = 0;
  std::uint64_t seed = 1;        // of the first weights

  [[nodiscard]] std::string json() const;
  // Throws std::invalid_argument; `where` begins the sentence.
  [[nodiscard]] static ModelConfig from_json(const std::string& text, const std::string& where);
};

// With its first weights.
[[nodiscard]] Model make_model(const ModelConfig& config);

}  // namespace heed_lm
