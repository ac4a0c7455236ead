// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes text with a model, token by token.

#include "model_config.hpp"
#include "tokenizer.hpp"

#include <functional>
#include <span>

namespace heed_lm {

struct Sampling {
  double temperature = 1;  // 0: always the likeliest token
  Index top_k = 0;         // draws among this many of the likeliest tokens; 0: among all
  double top_p = 1;        // draws among the likeliest tokens that together have this probability
  std::uint64_t seed = 1;
  Index vocabulary =
      0;             // draws only ids below this one, behind which no token stands; 0: among all
  Index window = 0;  // most tokens that the model reads; 0: as many as it has positions
};

// Throws std::invalid_argument for a number out of its range.
void require_sampling(const Sampling& sampling);

// The token that a text without a prompt begins with: the end of another text, or, where the tokenizer has none, a line
// break, a space, or else the tokenizer's first token.
[[nodiscard]] Index text_start(const Tokenizer& tokenizer);

// Chooses a token by its logits; `number` counts the draws. Among equal logits the lowest id counts as the likeliest.
// Throws std::runtime_error for a logit that is not finite.
[[nodiscard]] Index sample(std::span<const float> logits, const Sampling& sampling,
                           std::uint64_t number);

// Most tokens that the model may read at once.
[[nodiscard]] Index longest_context(const Model& model, const Sampling& sampling);

// Goes on from `prompt`, of which the model reads the last longest_context() tokens, for at most `count` tokens, and calls
// on_token(id) with each; it stops when that returns false. When the window or the model's
// positions are full, the model goes on from the last half of them.
void generate(Model& model, heed::nn::Context<float>& context, const std::vector<Index>& prompt,
              Index count, const Sampling& sampling, const std::function<bool(Index)>& on_token);

}  // namespace heed_lm
