// SPDX-License-Identifier: Apache-2.0

// Language models in float: determinism, and steps through a cache.

#include "nn_model_case.hpp"

using namespace heed_test;

TEST_CASE("Two steps of AdamW give the same bits for any number of threads, in float") {
  for (const std::string& name : layer_names()) check_determinism<float>(name);
}

TEST_CASE("Single tokens through a cache give the logits of the whole, in float") {
  nn::GptOptions o;
  o.vocabulary = 11;
  o.width = 8;
  o.heads = 2;
  o.depth = 2;
  o.max_len = 16;
  const std::vector<Index> ids = random_ids(16, 11, 1);
  for (const std::string& name : layer_names()) {
    INFO(name);
    auto model = gpt_around<float>(name, o);
    if (!model.can_step()) continue;
    shake<float>(model);
    nn::Context<float> c;
    nn::Matrix<float> whole(16, 11), one(1, 11);
    model.forward(c, 1, ids, whole.view());
    auto cache = model.new_cache(1);
    for (Index t = 0; t < 16; ++t) {
      model.step(c, std::span(ids).subspan(std::size_t(t), 1), cache, one.view());
      CHECK(largest_difference(numbers(one.view()), numbers(whole.view().row_range(t, 1))) < 2e-4);
    }
  }
}
