// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text from a model, token by token.

#include "model_config.hpp"
#include "tokenizer.hpp"

#include <functional>
#include <span>

namespace heed_lm {

struct Sampling {
  double temperature = 1;  // 0: always the likeliest token
  Index top_k = 0;         // of the likeliest tokens only; 0: all
  double top_p = 1;        // of the likeliest tokens that together have this probability
  std::uint64_t seed = 1;
  Index window = 0;  // tokens that the model reads at most; 0: as many as it has positions
};

// Throws std::invalid_argument for a number out of its range.
void require_sampling(const Sampling& sampling);

// What a text begins with if nothing is said: a line break; where the tokenizer has none, a space; else its
// first token.
[[nodiscard]] Index text_start(const Tokenizer& tokenizer);

// A token for these logits; `number` is that of the draw. Ties go to the lowest id. Throws std::runtime_error
// at a logit that is not finite.
[[nodiscard]] Index sample(std::span<const float> logits, const Sampling& sampling,
                           std::uint64_t number);

// Goes on from `prompt` for at most `count` tokens; on_token(id) returns false to stop. Where the window or
// the model's positions end, it goes on from the last half of them.
void generate(Model& model, heed::nn::Context<float>& context, const std::vector<Index>& prompt,
              Index count, const Sampling& sampling, const std::function<bool(Index)>& on_token);

}  // namespace heed_lm
