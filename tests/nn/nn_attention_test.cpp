// SPDX-License-Identifier: Apache-2.0

// Attention layers with their projections: gradients, causality, steps through a cache, errors.

#include "catch.hpp"
#include "nn_case.hpp"

#include <heed/check/causality.hpp>
#include <heed/compiled.hpp>
#include <heed/measure/select.hpp>
#include <heed/nn/attention_layers.hpp>

#include <memory>

using namespace heed_test;
using nn::ExtraSource;
using nn::RopePairs;

namespace {

constexpr Index kWidth = 8, kHeads = 2, kBatch = 2, kLen = 6;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
struct NamedLayer {
  std::string name;
  std::unique_ptr<nn::AttentionLayer<T>> layer;
  Index width_out;

  template <class Op>
  NamedLayer(std::string called, nn::ProjectedAttention<Op> made)
      : name(std::move(called)), width_out(made.width_out()) {
    layer = std::make_unique<nn::ProjectedAttention<Op>>(std::move(made));
    shake<T>(*layer);
  }
};

// Every layer of attention_layers.hpp, and one whose queries choose three keys.
template <class T>
std::vector<NamedLayer<T>> all_layers(bool causal) {
  std::vector<NamedLayer<T>> all;
  const auto add = [&](const char* name, auto layer) { all.emplace_back(name, std::move(layer)); };
  add("dar", nn::dar_attention<T>(kWidth, kHeads, {}, causal, true));
  add("differential", nn::differential_attention<T>(kWidth, kHeads, {}, causal));
  add("differential-v1", nn::differential_v1_attention<T>(kWidth, kHeads, 2, causal));
  add("differential-v2", nn::differential_v2_attention<T>(kWidth, kHeads, causal));
  add("latent", nn::latent_attention<T>(kWidth, kHeads, 3, causal));
  const auto intent = [&](ExtraSource gate, RopePairs pairs) {
    return nn::intent_attention<T>(kWidth, kHeads, gate, pairs, 100, causal);
  };
  add("intent", intent(ExtraSource::projected, RopePairs::interleaved));
  add("intent, pairs of halves", intent(ExtraSource::projected, RopePairs::halves));
  add("intent from query", intent(ExtraSource::from_query, RopePairs::halves));
  add("intent calculated", intent(ExtraSource::calculated, RopePairs::interleaved));
  add("ode", nn::resonant_attention<T>(kWidth, kHeads, {}, causal, true));
  add("dialectical", nn::dialectical_head<T>(kWidth, 4, {}, causal));
  nn::ProjectedAttention<heed::ScaledDot<T>> chooses(nn::AttentionOptions::even(kWidth, kHeads), {},
                                                     nn::causal_or_full<T>(causal));
  chooses.stage.choose = [](const auto& in, const auto& mask, const auto& options) {
    return heed::block_lists<T>(heed::select_keys(in, mask, 3, options));
  };
  add("chosen keys", std::move(chooses));
  return all;
}

// An intent layer with a projection each, as cross attention needs it.
nn::ProjectedAttention<heed::IntentGated<double>> split_intent(ExtraSource gate) {
  nn::AttentionOptions options = nn::AttentionOptions::even(kWidth, kHeads);
  options.names = nn::split_names();
  options.query_key_norm = true;
  options.rope = nn::Rope{options.heads.dim_qk, 100, RopePairs::halves};
  options.extra = gate;
  nn::ProjectedAttention<heed::IntentGated<double>> layer(options, {}, {});
  shake<double>(layer);
  return layer;
}

template <class T>
std::vector<T> forward(nn::AttentionLayer<T>& layer, Index width_out, Index batch,
                       const nn::MatrixView<const T>& x) {
  nn::Context<T> c;
  c.threads = 1;
  nn::Matrix<T> y(x.rows, width_out);
  layer.forward(c, batch, x, y.view());
  return numbers(y.view());
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Compares the gradients of cross attention of any layer with a projection each, by x, memory and
// weights, with differences.
template <class Op>
void check_cross(nn::ProjectedAttention<Op>& layer) {
  nn::Context<double> c;
  c.threads = 1;
  const Index tokens = kBatch * kLen, others = kBatch * (kLen + 3);
  auto x = normals<double>(tokens, kWidth, 1), memory = normals<double>(others, kWidth, 2);
  const auto g = normals<double>(tokens, kWidth, 3);
  nn::Matrix<double> y(tokens, kWidth), dx(tokens, kWidth), dmemory(others, kWidth);
  const auto run = [&] {
    layer.forward(c, kBatch, std::as_const(x).view(), std::as_const(memory).view(), y.view());
    return dot(numbers(y.view()), numbers(g.view()));
  };
  const auto report =
      check_layer(layer, run,
                  [&] {
                    run();
                    layer.backward(c, kBatch, std::as_const(x).view(), std::as_const(memory).view(),
                                   g.view(), dx.view(), dmemory.view());
                  },
                  {{"x", &x, &dx}, {"memory", &memory, &dmemory}});
  INFO(report.text());
  CHECK(report.passed);
}

// Feeds one sequence after the other into a cache, in chunks of these lengths.
template <class T>
std::vector<T> in_steps(nn::AttentionLayer<T>& layer, Index width_out, const nn::Matrix<T>& x,
                        const std::vector<Index>& chunks) {
  nn::Context<T> c;
  c.threads = 1;
  heed::KvCache<T> cache = layer.new_cache(kBatch);
  const Index len = x.rows() / kBatch;
  std::vector<T> all(std::size_t(x.rows() * width_out));
  for (const Index count : chunks) {
    const Index first = cache.len();
    nn::Matrix<T> part(kBatch * count, x.columns()), y(kBatch * count, width_out);
    for (Index b = 0; b < kBatch; ++b)
      std::copy_n(x.view().row(b * len + first), count * x.columns(), part.view().row(b * count));
    layer.step(c, kBatch, std::as_const(part).view(), y.view(), cache);
    for (Index b = 0; b < kBatch; ++b)
      std::copy_n(y.view().row(b * count), count * width_out,
                  all.data() + (b * len + first) * width_out);
  }
  CHECK(cache.len() == len);
  return all;
}

}  // namespace

TEST_CASE("The gradients of every attention layer are those of its forward pass") {
  const bool causal = GENERATE(true, false);
  for (auto& entry : all_layers<double>(causal)) {
    auto& layer = entry.layer;
    const Index width_out = entry.width_out;
    nn::Context<double> c;
    c.threads = 1;
    auto x = normals<double>(kBatch * kLen, kWidth, 1);
    const auto g = normals<double>(kBatch * kLen, width_out, 3);
    nn::Matrix<double> dx(kBatch * kLen, kWidth);
    const auto run = [&] {
      return dot(forward<double>(*layer, width_out, kBatch, std::as_const(x).view()),
                 numbers(g.view()));
    };
    const auto report =
        check_layer(*layer, run,
                    [&] {
                      (void)run();
                      layer->backward(c, kBatch, std::as_const(x).view(), g.view(), dx.view());
                    },
                    {{"x", &x, &dx}});
    INFO(entry.name << ", causal " << causal << ": " << report.text());
    CHECK(report.passed);
  }
}

TEST_CASE("The gradients of cross attention are those of its forward pass") {
  auto differential = nn::differential_attention<double>(kWidth, kHeads, {}, false);
  auto with_mask = nn::differential_attention<double>(kWidth, kHeads, {}, true);
  shake<double>(differential);
  shake<double>(with_mask);
  check_cross(differential);
  check_cross(with_mask);
  for (const ExtraSource gate : {ExtraSource::projected, ExtraSource::from_query}) {
    auto intent = split_intent(gate);
    check_cross(intent);
  }
}

TEST_CASE("Cross attention with a memory equal to x is self attention") {
  auto layer = split_intent(ExtraSource::from_query);
  nn::Context<double> c;
  const auto x = normals<double>(kBatch * kLen, kWidth, 1),
             same = normals<double>(kBatch * kLen, kWidth, 1);
  nn::Matrix<double> y(kBatch * kLen, kWidth);
  layer.forward(c, kBatch, x.view(), same.view(), y.view());
  CHECK(same_bits(numbers(y.view()), forward<double>(layer, kWidth, kBatch, x.view())));
}

TEST_CASE("A memory that begins where x begins, but is shorter, is a memory of its own") {
  auto layer = split_intent(ExtraSource::from_query);
  nn::Context<double> c;
  const auto x = normals<double>(kLen, kWidth, 1), copy = normals<double>(kLen, kWidth, 1);
  nn::Matrix<double> y(kLen, kWidth), y_of_copy(kLen, kWidth);
  layer.forward(c, 1, x.view(), x.view().row_range(0, kLen - 2), y.view());
  layer.forward(c, 1, x.view(), copy.view().row_range(0, kLen - 2), y_of_copy.view());
  CHECK(same_bits(numbers(y.view()), numbers(y_of_copy.view())));
}

TEST_CASE("Backward adds to the gradients of weights and overwrites those of x") {
  for (auto& [name, layer, width_out] : all_layers<double>(true)) {
    INFO(name);
    nn::Context<double> c;
    const auto x = normals<double>(kBatch * kLen, kWidth, 1),
               g = normals<double>(kBatch * kLen, width_out, 3);
    nn::Matrix<double> dx(kBatch * kLen, kWidth), again(kBatch * kLen, kWidth);
    (void)forward<double>(*layer, width_out, kBatch, x.view());
    dx.fill(kNan);
    layer->backward(c, kBatch, x.view(), g.view(), dx.view());
    std::vector<double> twice = all_gradients<double>(*layer);
    for (double& gradient : twice) gradient *= 2;
    again.fill(7);
    layer->backward(c, kBatch, x.view(), g.view(), again.view());
    CHECK(same_bits(numbers(dx.view()), numbers(again.view())));
    CHECK(largest_difference(all_gradients<double>(*layer), twice) < 1e-11);
  }
}

TEMPLATE_TEST_CASE("No output of a causal layer depends on a later token or another sequence", "",
                   float, double) {
  using T = TestType;
  const std::vector<T> x = numbers(normals<T>(kBatch * kLen, kWidth, 1).view());
  heed::CausalityOptions options;
  options.batch = kBatch;
  for (const bool causal : {true, false})
    for (auto& entry : all_layers<T>(causal)) {
      const auto report = heed::audit_causality(
          [&](const std::vector<T>& tokens) {
            return forward<T>(*entry.layer, entry.width_out, kBatch,
                              {tokens.data(), kBatch * kLen, kWidth});
          },
          x, kLen, options);
      INFO(entry.name << ", causal " << causal << ": " << report.text());
      CHECK(report.causal == causal);
      CHECK(report.effective > 0);
    }
}

TEMPLATE_TEST_CASE("Chunks through a cache give the rows of the whole", "", float, double) {
  using T = TestType;
  constexpr Index len = 19;
  const nn::Matrix<T> x = normals<T>(kBatch * len, kWidth, 1);
  for (auto& [name, layer, width_out] : all_layers<T>(true)) {
    REQUIRE(layer->can_step());
    // The restriction hides no further key, and the cache's second query has it at an offset of 0.
    layer->restrict_to(heed::window<T>(-1, 1, heed::Align::top_left, -1));
    const std::vector<T> slopes(name == "dialectical" ? 1 : std::size_t(kHeads), T(0.25));
    layer->restrict_to(heed::alibi<T>(slopes, heed::Align::top_left, -2));
    const std::vector<T> whole = forward<T>(*layer, width_out, kBatch, x.view());
    for (const std::vector<Index>& chunks :
         {std::vector<Index>(std::size_t(len), 1), std::vector<Index>{len},
          std::vector<Index>{1, 5, 1, 1, 9, 2}}) {
      INFO(name << ", " << chunks.size() << " chunks");
      const double bound = 2e2 * double(std::numeric_limits<T>::epsilon());
      CHECK(largest_difference(in_steps<T>(*layer, width_out, x, chunks), whole) < bound);
    }
  }
}

TEST_CASE("A restricted layer sees the keys that its own mask and the other one show") {
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  const auto outputs = [&](bool causal, const std::vector<heed::Mask<double>>& masks) {
    std::vector<std::vector<double>> all;
    for (auto& [name, layer, width_out] : all_layers<double>(causal)) {
      for (const auto& mask : masks) layer->restrict_to(mask);
      all.push_back(forward<double>(*layer, width_out, kBatch, x.view()));
    }
    return all;
  };
  const auto causal = heed::causal<double>(), near = heed::window<double>(2, 1);
  CHECK(outputs(false, {causal}) == outputs(true, {}));
  CHECK(outputs(false, {near, causal}) == outputs(true, {near}));
  CHECK(outputs(true, {near}) != outputs(true, {}));
}

TEST_CASE("A layer whose queries choose keys reads these alone") {
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  nn::ProjectedAttention<heed::ScaledDot<double>> layer(nn::AttentionOptions::even(kWidth, kHeads),
                                                        {}, heed::causal<double>());
  shake<double>(layer);
  CHECK(layer.takes_packed());
  const std::vector<double> all = forward<double>(layer, kWidth, kBatch, x.view());
  layer.stage.choose = [](const auto& in, const auto& mask, const auto& options) {
    return heed::block_lists<double>(heed::select_keys(in, mask, 2, options));
  };
  CHECK_FALSE(layer.takes_packed());
  const std::vector<double> chosen = forward<double>(layer, kWidth, kBatch, x.view());
  const heed::BlockLists lists =
      heed::select_keys<double>(layer.inputs(kBatch), heed::causal<double>(), 2);
  layer.stage.choose = nullptr;
  layer.restrict_to(heed::block_lists<double>(lists));
  CHECK(forward<double>(layer, kWidth, kBatch, x.view()) == chosen);
  // The first two tokens see no more than two keys; the loops that read lists round by themselves.
  const auto part = [](const std::vector<double>& rows, Index first, Index end) {
    return std::vector<double>(rows.begin() + first * kWidth, rows.begin() + end * kWidth);
  };
  CHECK(largest_difference(part(chosen, 0, 2), part(all, 0, 2)) < 1e-14);
  CHECK(largest_difference(part(chosen, 2, kLen), part(all, 2, kLen)) > 1e-3);
}

TEST_CASE("A layer whose rows depend on later ones cannot step") {
  for (const auto& [name, layer, width_out] : all_layers<double>(false)) {
    INFO(name);
    CHECK_FALSE(layer->can_step());
  }
  heed::DialecticalOptions together;
  together.halting = heed::Halting::batch;
  CHECK_FALSE(nn::dialectical_head<double>(kWidth, 4, together, true).can_step());
}

TEST_CASE("A rotated chunk stands at the position behind the cache") {
  auto layer =
      nn::intent_attention<double>(kWidth, 1, ExtraSource::projected, RopePairs::halves, 100);
  shake<double>(layer);
  nn::Context<double> c;
  const auto x = normals<double>(kLen, kWidth, 1);
  (void)forward<double>(layer, kWidth, 1, x.view());
  std::vector<double> whole;
  for (Index t = 0; t < kLen; ++t)
    whole.insert(whole.end(), layer.inputs(1).query.plain().row(0, 0, t),
                 layer.inputs(1).query.plain().row(0, 0, t) + kWidth);
  heed::KvCache<double> cache = layer.new_cache(1);
  for (Index t = 0; t < kLen; ++t) {
    nn::Matrix<double> y(1, kWidth);
    layer.step(c, 1, x.view().row_range(t, 1), y.view(), cache);
    const double* turned = layer.inputs(1).query.plain().row(0, 0, 0);
    CHECK(largest_difference(std::vector<double>(turned, turned + kWidth),
                             std::vector<double>(whole.begin() + t * kWidth,
                                                 whole.begin() + (t + 1) * kWidth)) < 1e-14);
  }
}

TEST_CASE("Attention layers say what does not fit") {
  using Catch::Matchers::Contains;
  nn::Context<double> c;
  const auto x = normals<double>(5, kWidth, 1), memory = normals<double>(4, kWidth, 2);
  nn::Matrix<double> y(5, kWidth);
  auto dar = nn::dar_attention<double>(kWidth, kHeads);
  CHECK_THROWS_WITH(dar.forward(c, 2, x.view(), y.view()), Contains("5") && Contains("2"));
  CHECK_THROWS_WITH(dar.forward(c, 0, x.view(), y.view()), Contains("0 sequences"));
  CHECK_THROWS_WITH(dar.forward(c, 1, x.view(), memory.view(), y.view()),
                    Contains("a projection each"));
  CHECK_THROWS_WITH(dar.forward(c, 1, x.view().column_range(0, 4), y.view()),
                    Contains("5 x 4") && Contains("5 x 8"));
  auto calculated = split_intent(ExtraSource::calculated);
  CHECK_THROWS_WITH(calculated.forward(c, 1, x.view(), memory.view(), y.view()),
                    Contains("calculated gate"));
  CHECK_THROWS_WITH(nn::AttentionOptions::even(10, 3), Contains("10") && Contains("3"));
  nn::AttentionOptions gated = nn::AttentionOptions::even(kWidth, kHeads);
  gated.extra = ExtraSource::from_query;
  CHECK_THROWS_WITH(nn::ProjectedAttention<heed::Dar<double>>(gated, {}, {}),
                    Contains("no extra input"));
}
