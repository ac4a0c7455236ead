// SPDX-License-Identifier: Apache-2.0

// Measures of which tokens the tokens of layers and models read (models/attention_weights.hpp).

#include "catch.hpp"
#include "nn_model_case.hpp"

#include <heed/models/attention_measures.hpp>
#include <heed/models/attention_weights.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/reference/reference.hpp>

#include <cmath>

using namespace heed_test;

namespace {

constexpr Index kWidth = 16, kHeads = 2, kBatch = 2, kLen = 9;

// Compares with the reference's weights on the layer's own inputs.
template <class Layer>
void check_layer(Layer&& layer) {
  shake<double>(layer);
  nn::Context<double> c;
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  nn::Matrix<double> y(x.rows(), layer.width_out());
  layer.forward(c, kBatch, x.view(), y.view());
  const auto read = nn::weights_of(layer, c, kBatch, {.links = 2});
  const auto twin = heed::reference::forward(heed::reference::cast_whole_op<double>(layer.stage.op),
                                             nn::detail::last_problem(layer, kBatch, kBatch),
                                             {true, false, false});
  for (Index row = 0; row < read.rows(); ++row) {
    const double* w = twin.weights.data() + row * kLen;
    double total = 0;
    Index top = 0;
    for (Index j = 0; j < kLen; ++j) {
      total += w[j];
      if (std::abs(w[j]) > std::abs(w[top])) top = j;
    }
    CHECK(read.total[std::size_t(row)] == Approx(total).epsilon(1e-9));
    CHECK(read.links_of(row)[0].key == top);
    CHECK(read.links_of(row)[0].weight == Approx(w[top]).epsilon(1e-9));
  }
}

template <class T>
struct Shifted {
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + 1;
  }
};

}  // namespace

TEST_CASE("A layer's weights are those of its op on its own projections") {
  check_layer(nn::dar_attention<double>(kWidth, kHeads));
  check_layer(nn::differential_v2_attention<double>(kWidth, kHeads));
  check_layer(nn::intent_attention<double>(kWidth, kHeads, nn::ExtraSource::calculated,
                                           nn::RopePairs::halves));
  check_layer(nn::dialectical_head<double>(kWidth, 8));
}

TEST_CASE("Every layer that models are made of tells which tokens are read, none a later one") {
  nn::GptOptions o;
  o.vocabulary = 11;
  o.width = kWidth;
  o.heads = kHeads;
  o.depth = 2;
  o.max_len = kLen;
  const std::vector<Index> ids = random_ids(kBatch * kLen, o.vocabulary, 4);
  for (const std::string& name : layer_names()) {
    INFO(name);
    auto model = gpt_around<float>(name, o);
    shake<float>(model);
    nn::Context<float> c;
    c.training =
        name.starts_with("prototype");  // the memories of these learn after the measured pass
    nn::Matrix<float> logits(kBatch * kLen, o.vocabulary);
    model.forward(c, kBatch, ids, logits.view());
    for (auto& block : model.blocks()) {
      const auto read = nn::weights_of(block.attention(), c, kBatch, {.links = 3});
      REQUIRE(read);
      CHECK(read->batch == kBatch);
      CHECK(read->heads == kHeads);
      CHECK(read->len_q == kLen);
      for (Index b = 0; b < kBatch; ++b)
        for (Index h = 0; h < kHeads; ++h)
          for (Index i = 0; i < kLen; ++i) {
            const Index row = read->row(b, h, i);
            CHECK(std::isfinite(read->entropy[std::size_t(row)]));
            CHECK(read->entropy[std::size_t(row)] <= std::log(double(i + 1)) + 1e-5);
            CHECK(read->links_of(row)[0].key >= 0);
            for (const heed::WeightLink& link : read->links_of(row)) CHECK(link.key <= i);
            if (!name.starts_with("differential"))
              CHECK(read->total[std::size_t(row)] == Approx(1).epsilon(1e-5));
          }
    }
  }
}

TEST_CASE("Of a layer around another op nothing is known at run time, and all where its type is") {
  using Op = heed::OwnAttention<Shifted, float>;
  nn::ProjectedAttention<Op> layer(nn::AttentionOptions::even(kWidth, kHeads), Op{},
                                   heed::causal<float>());
  shake<float>(layer);
  nn::Context<float> c;
  const auto x = normals<float>(kLen, kWidth, 1);
  nn::Matrix<float> y(kLen, kWidth);
  layer.forward(c, 1, x.view(), y.view());
  const nn::AttentionLayer<float>& unknown = layer;
  CHECK_FALSE(nn::weights_of(unknown, c, 1).has_value());
  CHECK(nn::weights_of(layer, c, 1).total[0] == Approx(1));
}
