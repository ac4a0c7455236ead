// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models around an attention of the list, and two steps of their training.

#include "catch.hpp"
#include "nn_case.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/gpt.hpp>
#include <heed/nn/adamw.hpp>

namespace heed_test {

template <class T>
nn::LanguageModel<T> gpt_around(const std::string& name, const nn::GptOptions& o) {
  return nn::make_gpt<T>(o, [&](Index layer) {
    return nn::attention_by_name<T>(nn::name_in_block(name, layer, o.depth), o.width, o.heads,
                                    layer, 3);
  });
}

// The variants and the layers beside them.
inline std::vector<std::string> layer_names() {
  std::vector<std::string> names = nn::attention_names();
  for (const std::string& name : nn::extra_attention_names()) names.push_back(name);
  return names;
}

// A model of two blocks, each of two heads of width 4.
inline constexpr Index kVocabulary = 11;
inline nn::GptOptions small_gpt(Index max_len = 6) {
  nn::GptOptions o;
  o.vocabulary = kVocabulary;
  o.width = 8;
  o.heads = 2;
  o.depth = 2;
  o.max_len = max_len;
  o.hidden = 12;
  return o;
}
// `count` targets of the vocabulary. The fourth one is not counted.
inline std::vector<Index> some_targets(Index count) {
  std::vector<Index> targets = random_ids(count, kVocabulary, 2);
  targets[3] = nn::kIgnoreIndex;
  return targets;
}

// Large enough that each layer has work for several threads.
template <class T>
std::vector<T> train_twice(const std::string& name, int threads) {
  nn::GptOptions o;
  o.vocabulary = 700;
  o.width = 32;
  o.heads = 2;
  o.depth = 1;
  o.max_len = 96;
  o.hidden = 300;
  o.dropout = 0.1;
  nn::LanguageModel<T> model = gpt_around<T>(name, o);
  shake<T>(model);
  nn::Context<T> c;
  c.threads = threads;
  c.training = true;
  c.seed = 11;
  const std::vector<Index> ids = random_ids(3 * 96, o.vocabulary, 1),
                           targets = random_ids(3 * 96, o.vocabulary, 2);
  nn::AdamW<T> optimiser;
  for (c.step = 0; c.step < 2; ++c.step) {
    nn::clear_gradients<T>(model);
    const double loss = model.gradient(c, 3, ids, targets);
    CHECK(std::isfinite(loss));
    optimiser.step(c, model);
  }
  return all_weights<T>(model);
}

template <class T>
void check_determinism(const std::string& name) {
  INFO(name);
  const std::vector<T> one = train_twice<T>(name, 1);
  CHECK(same_bits(train_twice<T>(name, 2), one));
  CHECK(same_bits(train_twice<T>(name, 3), one));
}

}  // namespace heed_test
