// SPDX-License-Identifier: Apache-2.0
#include "generation.hpp"

#include <heed/core/random.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

// Computes the logits behind a growing sequence: with caches if all layers can step, else over the
// whole sequence for each token.
class Reader {
 public:
  Reader(Model& model, nn::Context<float>& context, Index len)
      : model_(model), context_(context), len_(len), cache_(model.new_cache(1)) {}

  // Reads these tokens too and returns the logits behind the last of them.
  [[nodiscard]] std::span<const float> read(std::span<const Index> tokens) {
    sequence_.insert(sequence_.end(), tokens.begin(), tokens.end());
    std::vector<Index> next(tokens.begin(), tokens.end());
    if (Index(sequence_.size()) > len_) {
      sequence_.erase(sequence_.begin(), sequence_.end() - std::max<Index>(1, len_ / 2));
      cache_ = model_.new_cache(1);
      next = sequence_;
    }
    if (!model_.can_step()) next = sequence_;
    const Index words = model_.options().vocabulary, rows = Index(next.size());
    logits_.resize(rows, words);
    if (model_.can_step())
      model_.step(context_, next, cache_, logits_.view());
    else
      model_.forward(context_, 1, next, logits_.view());
    return {logits_.view().row(rows - 1), std::size_t(words)};
  }

 private:
  Model& model_;
  nn::Context<float>& context_;
  Index len_;
  Model::Cache cache_;
  std::vector<Index> sequence_;
  nn::Matrix<float> logits_;
};

}  // namespace

void require_sampling(const Sampling& s) {
  heed::require(s.temperature >= 0 && std::isfinite(s.temperature), "--temperature is ",
                s.temperature, ", it must be at least 0 and finite");
  heed::require(s.top_k >= 0, "--top-k is ", s.top_k, ", it must be at least 0");
  heed::require(s.top_p > 0 && s.top_p <= 1, "--top-p is ", s.top_p, ", it must lie in (0, 1]");
  heed::require(s.window >= 0, "window is ", s.window, ", it must be at least 0");
}

Index text_start(const Tokenizer& tokenizer) {
  if (const auto end = tokenizer.end_of_text()) return *end;
  for (const char* wanted : {"\n", " "})
    for (Index id = 0; id < tokenizer.vocab_size(); ++id)
      if (tokenizer.token(id) == wanted) return id;
  return 0;
}

Index sample(std::span<const float> logits, const Sampling& s, std::uint64_t number) {
  // A NaN is neither larger nor smaller than another number, so that there would be no order for a choice.
  const auto wrong = std::ranges::find_if_not(logits, [](float x) { return std::isfinite(x); });
  if (wrong != logits.end())
    throw std::runtime_error("the logit of token " + std::to_string(wrong - logits.begin()) +
                             " is " + std::to_string(*wrong) + ", it must be finite");
  std::vector<Index> order(logits.size());
  std::iota(order.begin(), order.end(), Index(0));
  const auto likelier = [&](Index a, Index b) {
    const float x = logits[std::size_t(a)], y = logits[std::size_t(b)];
    return x > y || (x == y && a < b);
  };
  if (s.temperature == 0) return *std::min_element(order.begin(), order.end(), likelier);
  std::sort(order.begin(), order.end(), likelier);
  if (s.top_k > 0) order.resize(std::min(order.size(), std::size_t(s.top_k)));
  std::vector<double> weights;
  const double top = double(logits[std::size_t(order[0])]);
  for (const Index id : order)
    weights.push_back(std::exp((double(logits[std::size_t(id)]) - top) / s.temperature));
  double total = std::accumulate(weights.begin(), weights.end(), 0.0), kept = 0;
  std::size_t count = 0;
  while (count < weights.size() && (count == 0 || kept < s.top_p * total)) kept += weights[count++];
  double left = heed::CounterRandom(s.seed, 7).uniform(number) * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (left < weights[i]) return order[i];
    left -= weights[i];
  }
  return order[count - 1];
}

Index longest_context(const Model& model, const Sampling& s) {
  constexpr Index any = std::numeric_limits<Index>::max();
  const Index positions = model.options().max_len;
  return std::min(s.window > 0 ? s.window : any, positions > 0 ? positions : any);
}

void generate(Model& model, nn::Context<float>& context, const std::vector<Index>& prompt,
              Index count, const Sampling& sampling, const std::function<bool(Index)>& on_token) {
  require_sampling(sampling);
  heed::require(!prompt.empty(), "generate: the prompt has no token");
  const Index len = longest_context(model, sampling);
  Reader reader(model, context, len);
  std::vector<Index> next(prompt.end() - std::min(len, Index(prompt.size())), prompt.end());
  for (Index n = 0; n < count; ++n) {
    const std::span<const float> logits = reader.read(next);
    const Index words = sampling.vocabulary > 0 ? sampling.vocabulary : Index(logits.size());
    const Index id = sample(logits.first(std::size_t(words)), sampling, std::uint64_t(n));
    if (!on_token(id)) return;
    next = {id};
  }
}

}  // namespace heed_lm
