// SPDX-License-Identifier: Apache-2.0

// Layers of the zoo that are no variants: their rows in plain loops, their gradients, their steps.

#include "catch.hpp"
#include "message_of.hpp"
#include "nn_case.hpp"

#include <heed/compiled.hpp>
#include <zoo/dsa.hpp>
#include <zoo/nsa.hpp>

using namespace heed_test;

namespace {

constexpr Index kWidth = 8, kHeads = 2, kBatch = 2, kLen = 21;
const nn::AttentionOptions kOptions = [] {
  nn::AttentionOptions options = nn::AttentionOptions::even(kWidth, kHeads);
  options.names.out = "";  // rows as attention leaves them
  return options;
}();
constexpr zoo::nsa::Sizes kNsa{{4, 2}, 4, 3, 5};

template <class Layer>
std::vector<double> forward(Layer& layer, const nn::Matrix<double>& x) {
  nn::Context<double> c;
  c.threads = 1;
  nn::Matrix<double> y(x.rows(), kWidth);
  layer.forward(c, kBatch, x.view(), y.view());
  return numbers(y.view());
}
// The row of query i of head h, with the first `end` keys of head kv.
zoo::PlainRow row_of(const heed::Inputs<double>& in, Index b, Index h, Index kv, Index i,
                     Index end) {
  const auto numbers_of = [](const auto& view, Index batch, Index head, Index t) {
    const double* row = view.plain().row(batch, head, t);
    return zoo::Numbers(row, row + view.shape().dim);
  };
  zoo::PlainRow row;
  row.position = i;
  row.query = numbers_of(in.query, b, h, i);
  row.scale = 1 / std::sqrt(double(row.query.size()));
  for (Index j = 0; j < end; ++j) {
    row.keys.push_back(numbers_of(in.key, b, kv, j));
    row.values.push_back(numbers_of(in.value, b, kv, j));
    row.positions.push_back(j);
  }
  row.own_value = zoo::Numbers(std::size_t(in.value.shape().dim));
  if (in.extra.given()) row.extra = numbers_of(in.extra, b, h, i);
  return row;
}
// largest |y - plain(b, h, i)|
template <class Plain>
double largest_error(const std::vector<double>& y, Plain&& plain) {
  double largest = 0;
  for (Index b = 0; b < kBatch; ++b)
    for (Index i = 0; i < kLen; ++i)
      for (Index h = 0; h < kHeads; ++h) {
        const zoo::Numbers wanted = plain(b, h, i);
        const Index width = Index(wanted.size());
        for (Index c = 0; c < width; ++c)
          largest =
              std::max(largest, std::abs(y[std::size_t((b * kLen + i) * kWidth + h * width + c)] -
                                         wanted[std::size_t(c)]));
      }
  return largest;
}
template <class Layer>
heed::GradientReport gradients_of(Layer& layer) {
  nn::Context<double> c;
  c.threads = 1;
  auto x = normals<double>(kBatch * kLen, kWidth, 1);
  const auto g = normals<double>(kBatch * kLen, kWidth, 3);
  nn::Matrix<double> dx(kBatch * kLen, kWidth);
  const auto run = [&] {
    const auto y = forward(layer, x), down = numbers(g.view());
    double sum = 0;
    for (std::size_t n = 0; n < y.size(); ++n) sum += y[n] * down[n];
    return sum;
  };
  return check_layer(layer, run,
                     [&] {
                       (void)run();
                       layer.backward(c, kBatch, std::as_const(x).view(), g.view(), dx.view());
                     },
                     {{"x", &x, &dx}});
}

}  // namespace

TEST_CASE("native sparse attention is what its plain loops say") {
  zoo::nsa::Layer<double> layer(kOptions, kNsa);
  shake<double>(layer);
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  const std::vector<double> y = forward(layer, x);
  const heed::Inputs<double> in = layer.inputs(kBatch);
  Index narrowed = 0;
  const auto plain = [&](Index b, Index h, Index i) {
    const auto gate = [&](std::size_t c, const zoo::PlainRow& row) {
      return 1 / (1 + std::exp(-row.extra[c]));
    };
    // Branch 0: means of the windows that end at or before i.
    const zoo::PlainRow all = row_of(in, b, h, h, i, kLen);
    zoo::PlainRow windows = all;
    windows.keys.clear();
    windows.values.clear();
    for (Index j = 0; j * 2 + 4 <= i + 1; ++j) {
      zoo::Numbers key(all.query.size()), value(all.query.size());
      for (Index t = 2 * j; t < 2 * j + 4; ++t)
        for (std::size_t c = 0; c < key.size(); ++c) {
          key[c] += all.keys[std::size_t(t)][c] / 4;
          value[c] += all.values[std::size_t(t)][c] / 4;
        }
      windows.keys.push_back(key);
      windows.values.push_back(value);
    }
    const zoo::Numbers weights = zoo::softmax(zoo::logits(windows));
    zoo::Numbers out = zoo::mixed(windows, weights);
    for (double& number : out) number *= gate(0, all);
    const auto add = [&](std::size_t c, const zoo::PlainRow& row) {
      const zoo::Numbers own = zoo::mixed(row, zoo::softmax(zoo::logits(row)));
      for (std::size_t n = 0; n < out.size(); ++n) out[n] += gate(c, row) * own[n];
    };
    const zoo::PlainRow seen = row_of(in, b, h, kHeads + h, i, i + 1);
    const zoo::PlainRow kept = zoo::nsa::kept(seen, {weights}, kNsa);
    narrowed += kept.keys.size() < seen.keys.size();
    add(1, kept);
    add(2, row_of(in, b, h, 2 * kHeads + h, i, i + 1).seeing([&](Index j) { return i - j < 5; }));
    return out;
  };
  CHECK(largest_error(y, plain) < 1e-12);
  CHECK(narrowed > kBatch * kHeads);
}

TEST_CASE("DeepSeek sparse attention is what its plain loops say") {
  zoo::dsa::Layer<double> layer(kOptions, {.keys = 5, .heads = 3, .columns = 2});
  shake<double>(layer);
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  for (const bool dense : {false, true}) {
    layer.dense = dense;
    const std::vector<double> y = forward(layer, x);
    const heed::Inputs<double> in = layer.projected.inputs(kBatch);
    // Row t of x W^T.
    const auto projected = [&](const nn::Linear<double>& linear, Index row, Index first,
                               Index count) {
      zoo::Numbers to;
      for (Index o = first; o < first + count; ++o) {
        double sum = 0;
        for (Index c = 0; c < kWidth; ++c)
          sum += linear.weight.value[o * kWidth + c] * x.view().row(row)[c];
        to.push_back(sum);
      }
      return to;
    };
    const auto plain = [&](Index b, Index h, Index i) {
      const Index token = b * kLen + i;
      std::vector<zoo::Numbers> p, z;
      for (Index a = 0; a < 3; ++a) p.push_back(projected(layer.index_query, token, 2 * a, 2));
      for (Index j = 0; j < kLen; ++j) z.push_back(projected(layer.index_key, b * kLen + j, 0, 2));
      zoo::PlainRow row = row_of(in, b, h, h, i, i + 1);
      if (!dense) row = zoo::dsa::chosen(row, p, projected(layer.index_weights, token, 0, 3), z, 5);
      return zoo::mixed(row, zoo::softmax(zoo::logits(row)));
    };
    CHECK(largest_error(y, plain) < 1e-12);
  }
}

TEST_CASE("the gradients of native sparse attention are those of its forward pass") {
  zoo::nsa::Layer<double> layer(kOptions, kNsa);
  shake<double>(layer);
  const auto report = gradients_of(layer);
  INFO(report.text());
  CHECK(report.passed);
}

TEST_CASE("an indexer learns to choose as attention weighs, and attention learns nothing of it") {
  zoo::dsa::Layer<double> layer(kOptions, {.keys = 5, .heads = 3, .columns = 2});
  shake<double>(layer);
  nn::Context<double> c;
  c.threads = 1;
  const auto x = normals<double>(kBatch * kLen, kWidth, 1),
             g = normals<double>(kBatch * kLen, kWidth, 3);
  nn::Matrix<double> dx(kBatch * kLen, kWidth);
  for (const bool dense : {true, false}) {
    layer.dense = dense;
    const auto loss = [&] {
      (void)forward(layer, x);
      CHECK(layer.diagnostics().empty());
      nn::clear_gradients<double>(layer);
      layer.backward(c, kBatch, x.view(), g.view(), dx.view());
      return layer.diagnostics().at(0).second;
    };
    const double before = loss();
    for (const auto linear : {&layer.index_query, &layer.index_key, &layer.index_weights}) {
      for (const Index n : {0, 3, 7}) {
        (void)loss();
        const double slope = linear->weight.grad[n];
        double& weight = linear->weight.value[n];
        const double at = weight, h = 1e-6;
        weight = at + h;
        const double above = loss();
        weight = at - h;
        const double below = loss();
        weight = at;
        CHECK(std::abs(slope - (above - below) / (2 * h)) < 1e-7);
      }
    }
    // What x and the projections of attention get is the gradient of the chosen keys alone.
    (void)loss();
    const std::vector<double> of_x = numbers(dx.view());
    layer.projected.backward(c, kBatch, x.view(), g.view(), dx.view());
    CHECK(numbers(dx.view()) == of_x);
    for (int step = 0; step < 60; ++step) {
      (void)loss();
      for (const auto linear : {&layer.index_query, &layer.index_key, &layer.index_weights})
        for (Index n = 0; n < linear->weight.value.size(); ++n)
          linear->weight.value[n] -= 0.5 * linear->weight.grad[n];
    }
    CHECK(loss() < 0.8 * before);
  }
}

TEST_CASE("native sparse attention takes tokens in steps to the rows of the whole sequence") {
  zoo::nsa::Layer<double> layer(kOptions, kNsa);
  shake<double>(layer);
  const auto x = normals<double>(kLen, kWidth, 1);
  nn::Context<double> c;
  c.threads = 1;
  nn::Matrix<double> whole(kLen, kWidth), y(kLen, kWidth);
  layer.forward(c, 1, x.view(), whole.view());
  for (const Index prompt : {1, 9}) {
    heed::KvCache<double> cache = layer.new_cache(1);
    for (Index t = 0, count = prompt; t < kLen; t += count, count = 1)
      layer.step(c, 1, x.view().row_range(t, count), y.view().row_range(t, count), cache);
    CHECK(largest_difference(numbers(y.view()), numbers(whole.view())) < 1e-13);
  }
}

TEST_CASE("layers of the zoo that are no variants say what they do not take") {
  CHECK(message_of([] {
          zoo::nsa::Layer<float>(kOptions, {{8, 4}, 4, 2, 3});
        }) == "zoo:nsa: windows have 8 keys, blocks 4; windows may have no more");
  zoo::nsa::Layer<float> nsa(kOptions);
  CHECK(message_of([&] { nsa.restrict_to(heed::window<float>(3, 0)); }) ==
        "zoo:nsa: a mask was given, keys that are means of windows of tokens take none");
  CHECK_FALSE(nsa.takes_packed());
  CHECK_FALSE(zoo::dsa::Layer<float>(kOptions).can_step());
}
