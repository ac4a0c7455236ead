// SPDX-License-Identifier: Apache-2.0
// Dropout of attention weights: the pattern, every variant against its reference and central
// differences, layers and models.

#include "catch.hpp"
#include "conformance/runner.hpp"
#include "message_of.hpp"
#include "tolerances.hpp"

#include <heed/explain.hpp>
#include <heed/models/gpt.hpp>

using namespace heed_test;
namespace nn = heed::nn;

namespace {

constexpr double kRate = 0.3;

// In double, the reference and the differences drop weights as the call does.
template <class T, class Op>
Runner<T> dropping_runner(const heed::Variant<Op>& variant) {
  const auto op = std::make_shared<Op>(variant.op);
  heed_test::detail::shake(*op, variant.geometry, true);
  Runner<T> runner;
  runner.name = variant.name;
  runner.geometry = variant.geometry;
  runner.extra_dim = op->extra_dim(variant.geometry);
  heed_test::detail::attach<T, Needs{.backward = true}, Op>(runner, op);
  if constexpr (std::is_same_v<T, double>) {
    const auto problem_of = [](const Call<T>& call) {
      auto problem = heed_test::detail::problem_of<double>(call);
      problem.dropout = call.options.dropout;
      return problem;
    };
    runner.twin = [op, problem_of](const Call<T>& call) {
      return Twin{heed::reference::forward(*op, problem_of(call)).out, {}, {}, {}, {}};
    };
    runner.differences = [op, problem_of](const Call<T>& call, const Named& analytic,
                                          Index entries) {
      const auto problem = problem_of(call);
      const auto grad_out = call.grad_out.template dense<double>();
      const Named tensors = heed::detail::op_tensors(*op, problem);
      heed::detail::OpLoss<Op> loss{*op, problem, grad_out, {}};
      for (const heed::NamedTensor& tensor : tensors) loss.names.push_back(tensor.name);
      heed::GradcheckOptions options;
      options.max_entries_per_tensor = entries;
      return heed::check_gradient_on<double>(loss, tensors, analytic, options);
    };
  }
  return runner;
}
// Every variant that can run on `g`.
std::vector<Runner<double>> all_dropping(const Geometry& g) {
  std::vector<Runner<double>> all;
  heed::for_each_variant<double>(g,
                                 [&]<class Op>(const heed::Variant<Op>& variant) {
                                   if (Op::ReadoutType::uses_own_rows && g.len_q > g.len_kv) return;
                                   all.push_back(dropping_runner<double>(variant));
                                 },
                                 {.prototypes = 3});
  return all;
}
// A streaming normaliser, and one of whole rows with weights of both signs.
template <class T>
std::vector<Runner<T>> two_dropping(const Geometry& g) {
  return {dropping_runner<T>(heed::Variant<heed::ScaledDot<T>>{"sdpa", "", g, {}}),
          dropping_runner<T>(heed::Variant<heed::Differential<T>>{"differential", "", g, {}})};
}

struct Setting {
  Index len_q, len_kv, kv_heads;
  bool causal;
  int panel_vectors;  // 0: the plan's; tiles likewise
};
// Panels and tiles of the plan, and small ones that these lengths cross; GQA; a single query.
constexpr Setting kSettings[] = {{35, 35, 2, false, 0}, {21, 21, 1, true, 1}, {9, 37, 2, true, 0},
                                 {9, 37, 1, false, 2},  {1, 35, 1, false, 0}, {1, 35, 1, false, 1}};

template <class T>
Call<T> dropping_call(const Runner<T>& runner, const Setting& s) {
  Call<T> call = random_call<T>(runner.geometry, runner.extra_dim, 3);
  // Numbers in [-1, 1): with larger ones the truncation of the differences would show.
  const std::vector<double> grad_out = heed::gradcheck_grad_out(call.geometry);
  std::copy(grad_out.begin(), grad_out.end(), call.grad_out.view().data());
  if (s.causal) call.mask = owned(heed::causal<T>(heed::Align::bottom_right));
  call.options.panel_vectors = std::min(s.panel_vectors, heed::kPanelVectors);
  call.options.key_tile = s.panel_vectors;
  call.options.dropout = {kRate, 77};
  return call;
}
Geometry geometry_of(const Setting& s) {
  return geometry(2, 2, s.kv_heads, s.len_q, s.len_kv, 4, 4);
}

// All gradients behind one another.
std::vector<double> joined(const Named& named) {
  std::vector<double> all;
  for (const auto& tensor : named)
    all.insert(all.end(), tensor.values.begin(), tensor.values.end());
  return all;
}

// The weights (batch, heads, len_q, len_kv) with which plain attention mixes values, found from
// values that are the unit vectors.
template <class T>
std::vector<double> weights_of(const Geometry& shape, const heed::Options& options,
                               const heed::Mask<T>& mask = {}) {
  Geometry g = shape;
  g.dim_v = g.len_kv;
  Call<T> call = random_call<T>(g, 0, 5);
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.kv_heads; ++h)
      for (Index j = 0; j < g.len_kv; ++j)
        for (Index c = 0; c < g.len_kv; ++c) call.value(b, h, j, c) = T(j == c);
  Tensor<T> out(call.grad_out.shape());
  heed::forward(heed::ScaledDot<T>{}, call.inputs(), mask, out.view(), nullptr, options);
  return out.template dense<double>();
}
heed::Options dropping(double rate, std::uint64_t seed) {
  heed::Options options;
  options.threads = 1;
  options.dropout = {rate, seed};
  return options;
}
// 1 where a weight is kept.
std::vector<double> kept(const std::vector<double>& weights) {
  std::vector<double> all;
  for (const double w : weights) all.push_back(w != 0);
  return all;
}

// The kept places by the formula at the head of simd/keep_bits.hpp, place by place.
std::vector<double> kept_by_hand(const Geometry& g, double rate, std::uint64_t seed) {
  std::vector<double> all;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) {
        const heed::CounterRandom of_batch(seed, std::uint64_t(b));
        const heed::CounterRandom of_head(of_batch.bits(std::uint64_t(h)));
        const std::uint64_t key = of_head.bits(std::uint64_t(i));
        for (Index j = 0; j < g.len_kv; ++j) {
          auto hash = std::uint32_t(key) + std::uint32_t(j) * 0x9E3779B9U;
          hash = ((hash ^ (hash >> 16)) * 0x85EBCA6BU) ^ std::uint32_t(key >> 32);
          hash = (hash ^ (hash >> 13)) * 0xC2B2AE35U;
          all.push_back(double(hash) < (1 - rate) * 0x1.0p32);
        }
      }
  return all;
}

// The agreement of two patterns beyond chance, in standard deviations.
double correlation(const std::vector<double>& a, const std::vector<double>& b, std::size_t lag,
                   double rate) {
  double sum = 0;
  const std::size_t count = a.size() - lag;
  for (std::size_t n = 0; n < count; ++n) sum += (a[n] - (1 - rate)) * (b[n + lag] - (1 - rate));
  return sum / (rate * (1 - rate) * std::sqrt(double(count)));
}

}  // namespace

TEMPLATE_TEST_CASE("Which pairs are dropped depends on seed, batch, head and positions alone",
                   "[dropout]", float, double) {
  using T = TestType;
  for (const auto& [len_q, len_kv] :
       {std::pair<Index, Index>{1, 70}, {2, 33}, {5, 70}, {17, 9}, {70, 70}}) {
    const Geometry g = geometry(2, 4, 2, len_q, len_kv, 4, 4);
    const std::vector<double> wanted = kept_by_hand(g, kRate, 9);
    heed::Options options = dropping(kRate, 9);
    const std::vector<double> whole = weights_of<T>(g, dropping(0, 9));
    for (int vectors = 0; vectors <= heed::kPanelVectors; ++vectors)
      for (const Index tile : {0, 1, 20}) {
        INFO(describe(g) << ", " << vectors << " vectors, tiles of " << tile);
        options.panel_vectors = vectors;
        options.key_tile = tile;
        const std::vector<double> weights = weights_of<T>(g, options);
        double error = 0;
        for (std::size_t n = 0; n < weights.size(); ++n)
          error = std::max(error, std::abs(weights[n] - wanted[n] * whole[n] / (1 - kRate)));
        CHECK(error < 16 * double(std::numeric_limits<T>::epsilon()));
        CHECK(kept(weights) == wanted);
      }
  }
}

TEST_CASE("Dropout drops its share of pairs and keeps the mean", "[dropout]") {
  const Geometry g = geometry(2, 3, 3, 200, 150, 4, 4);
  const double rows = double(g.query_rows()), pairs = rows * double(g.len_kv);
  const std::vector<double> whole = weights_of<float>(g, dropping(0, 0));
  for (const double rate : {0.1, 0.5, 0.9}) {
    const std::vector<double> weights = weights_of<float>(g, dropping(rate, 3));
    double share = 0, sum = 0, squares = 0;
    for (const double one : kept(weights)) share += one / pairs;
    for (std::size_t n = 0; n < weights.size(); ++n) {
      sum += weights[n];
      squares += whole[n] * whole[n];
    }
    // Four standard deviations; rows sum to 1 without dropout.
    CHECK(std::abs(share - (1 - rate)) < 4 * std::sqrt(rate * (1 - rate) / pairs));
    CHECK(std::abs(sum - rows) < 4 * std::sqrt(squares * rate / (1 - rate)));
  }
}

TEST_CASE("Seeds, batches, heads, queries and keys are dropped independently", "[dropout]") {
  const Geometry g = geometry(2, 2, 1, 128, 96, 4, 4);
  const auto pattern = [&](std::uint64_t seed) {
    return kept(weights_of<float>(g, dropping(kRate, seed)));
  };
  const std::vector<double> one = pattern(1);
  CHECK(one == pattern(1));
  CHECK(one != pattern(2));
  for (const std::uint64_t other : {2U, 3U, 1U << 20})
    CHECK(std::abs(correlation(one, pattern(other), 0, kRate)) < 4);
  // Neighbours along keys, the next queries, heads and batches.
  for (const Index lag : {1, 2, 8, 16, 96, 97, 192, 768, 96 * 128, 96 * 256}) {
    INFO("lag " << lag);
    CHECK(std::abs(correlation(one, one, std::size_t(lag), kRate)) < 4);
  }
}

TEST_CASE("Every variant drops what its twin drops, forward and backward", "[dropout]") {
  for (const Setting& s : kSettings)
    for (const Runner<double>& runner : all_dropping(geometry_of(s))) {
      const Call<double> call = dropping_call(runner, s);
      INFO(runner.name << ", " << describe(runner.geometry));
      const Outcome<double> result = forward(runner, call);
      const std::vector<double> out = result.out.dense(), slow = runner.twin(call).out;
      double error = 0;
      for (std::size_t n = 0; n < out.size(); ++n)
        error = std::max(error, std::abs(out[n] - slow[n]));
      CHECK(error < 1e-12 * std::max(1.0, largest(slow)));
      const auto report =
          runner.differences(call, backward(runner, call, result), s.len_q > 30 ? 4 : 6);
      INFO(report.text());
      // The fixed point bends so much that the truncation of its differences shows, without dropout as well.
      CHECK(report.worst_error <
            (runner.name == "dar-converged" ? 2e-6 : tolerance::central_difference));
    }
}

TEST_CASE("Float drops what double drops", "[dropout]") {
  for (const Setting& s : kSettings) {
    const auto floats = two_dropping<float>(geometry_of(s));
    const auto doubles = two_dropping<double>(geometry_of(s));
    for (std::size_t n = 0; n < floats.size(); ++n) {
      INFO(floats[n].name << ", " << describe(floats[n].geometry));
      const Call<float> narrow = dropping_call(floats[n], s);
      const Call<double> wide = dropping_call(doubles[n], s);
      const Outcome<float> a = forward(floats[n], narrow);
      const Outcome<double> b = forward(doubles[n], wide);
      const auto check = [](const std::vector<double>& x, const std::vector<double>& y) {
        double error = 0;
        REQUIRE(x.size() == y.size());
        for (std::size_t i = 0; i < x.size(); ++i) error = std::max(error, std::abs(x[i] - y[i]));
        CHECK(error < 3e-5 * std::max(1.0, largest(y)));
      };
      check(a.out.dense<double>(), b.out.dense());
      check(joined(backward(floats[n], narrow, a)), joined(backward(doubles[n], wide, b)));
    }
  }
}

TEST_CASE("Dropout gives the same bits for any number of threads", "[dropout]") {
  const Setting s{70, 70, 1, true, 1};
  for (const Runner<double>& runner : all_dropping(geometry_of(s))) {
    INFO(runner.name);
    Call<double> call = dropping_call(runner, s);
    const Outcome<double> one = forward(runner, call);
    const std::vector<double> gradients = joined(backward(runner, call, one));
    for (const int threads : {2, 3}) {
      call.options.threads = threads;
      const Outcome<double> more = forward(runner, call);
      CHECK(same_bits(more.out.dense(), one.out.dense()));
      CHECK(same_bits(joined(backward(runner, call, more)), gradients));
    }
  }
}

TEST_CASE("A rate of 0 changes no bit, and lse never changes", "[dropout]") {
  for (const Setting& s : {kSettings[1], kSettings[4]})
    for (const Runner<double>& runner : all_dropping(geometry_of(s))) {
      INFO(runner.name);
      Call<double> call = dropping_call(runner, s);
      const Outcome<double> dropped = forward(runner, call);
      call.options.dropout.rate = 0;
      const Outcome<double> zero = forward(runner, call);
      const std::vector<double> gradients = joined(backward(runner, call, zero));
      call.options.dropout = {};
      const Outcome<double> without = forward(runner, call);
      CHECK(same_bits(zero.out.dense(), without.out.dense()));
      CHECK(same_bits(gradients, joined(backward(runner, call, without))));
      CHECK_FALSE(same_bits(dropped.out.dense(), without.out.dense()));
      // A single query per head is folded into rows without dropout: other products, other roundings.
      REQUIRE(dropped.saved.lse.size() == without.saved.lse.size());
      for (std::size_t n = 0; n < dropped.saved.lse.size(); ++n)
        CHECK(dropped.saved.lse[n] == Approx(without.saved.lse[n]).margin(1e-12));
    }
}

TEST_CASE("A NaN behind a hidden pair stays hidden, behind a dropped one it shows", "[dropout]") {
  const Geometry g = geometry(1, 1, 1, 24, 24, 4, 4);
  Call<float> call = random_call<float>(g, 0, 1);
  for (Index c = 0; c < 4; ++c) call.value(0, 0, 20, c) = std::numeric_limits<float>::quiet_NaN();
  call.options.dropout = {0.5, 4};
  Tensor<float> out(call.grad_out.shape()), dvalue(call.value.shape()), dquery(call.query.shape());
  heed::Saved<float> saved;
  const auto mask = heed::causal<float>();
  heed::forward(heed::ScaledDot<float>{}, call.inputs(), mask, out.view(), &saved, call.options);
  heed::backward(heed::ScaledDot<float>{}, call.inputs(), mask, saved, std::as_const(out).view(),
                 std::as_const(call.grad_out).view(), {dquery.view(), {}, dvalue.view(), {}, {}},
                 nullptr, call.options);
  for (Index i = 0; i < 24; ++i) {
    CHECK(std::isnan(out(0, 0, i, 0)) == (i >= 20));
    CHECK(std::isnan(dquery(0, 0, i, 0)) == (i >= 20));
    CHECK(std::isfinite(dvalue(0, 0, i, 0)));
  }
}

TEST_CASE("Doors refuse a rate of dropout outside of [0, 1)", "[dropout]") {
  const Call<float> call = random_call<float>(geometry(1, 2, 1, 1, 3, 4, 4), 0);
  Tensor<float> out(call.grad_out.shape());
  const heed::ScaledDot<float> op;
  heed::Saved<float> saved;
  heed::forward(op, call.inputs(), {}, out.view(), &saved);
  for (const auto& [rate, text] : {std::pair{1.0, "1"}, {-0.5, "-0.5"}, {std::nan(""), "nan"}}) {
    const std::string wanted = "dropout.rate is " + std::string(text) + ", it must be in [0, 1)";
    const heed::Options options = dropping(rate, 1);
    CHECK(message_of([&] { heed::forward(op, call.inputs(), {}, out.view(), nullptr, options); }) ==
          "heed::forward: Options: " + wanted);
    CHECK(message_of([&] {
            heed::backward(op, call.inputs(), {}, saved, std::as_const(out).view(),
                           call.grad_out.view(), {}, nullptr, options);
          }) == "heed::backward: Options: " + wanted);
    CHECK(message_of([&] {
            (void)heed::explain(op, call.geometry, {}, heed::Pass::forward, options);
          }) == "heed::explain: Options: " + wanted);
    auto problem = heed_test::detail::problem_of<float>(call);
    problem.dropout.rate = rate;
    CHECK(message_of([&] { (void)heed::reference::forward(op, problem); }) ==
          "reference::forward: " + wanted);
  }
}

namespace {

constexpr Index kBatch = 2, kLen = 6, kVocabulary = 11;

// Two blocks, of plain and of differential attention, with weights off their makers' values.
nn::LanguageModel<double> small_gpt(double attention_dropout, double dropout = 0) {
  nn::GptOptions o;
  o.vocabulary = kVocabulary;
  o.width = 8;
  o.heads = 2;
  o.depth = 2;
  o.max_len = kLen;
  o.hidden = 12;
  o.dropout = dropout;
  o.attention_dropout = attention_dropout;
  auto model =
      nn::make_gpt<double>(o, [&](Index layer) -> std::unique_ptr<nn::AttentionLayer<double>> {
        if (layer == 1)
          return std::make_unique<nn::ProjectedAttention<heed::Differential<double>>>(
              nn::differential_attention<double>(8, 2));
        return std::make_unique<nn::ProjectedAttention<heed::ScaledDot<double>>>(
            nn::AttentionOptions::even(8, 2), heed::ScaledDot<double>{}, heed::causal<double>());
      });
  std::uint64_t stream = 100;
  model.visit([&](const std::string&, heed::Param<double>& value, heed::Param<double>&) {
    const heed::CounterRandom random(kSeed, stream++);
    const double spread = value.shape().size() > 1 ? 0.4 : 0.05;
    for (Index i = 0; i < value.size(); ++i) value[i] += spread * random.normal(std::uint64_t(i));
  });
  return model;
}
nn::Context<double> context(bool training) {
  nn::Context<double> c;
  c.threads = 1;
  c.training = training;
  c.seed = 5;
  c.step = 8;
  return c;
}
std::vector<Index> ids(std::uint64_t stream) {
  const heed::CounterRandom random(kSeed, stream);
  std::vector<Index> all;
  for (Index i = 0; i < kBatch * kLen; ++i)
    all.push_back(Index(random.bits(std::uint64_t(i)) % std::uint64_t(kVocabulary)));
  return all;
}
template <class C>
double loss_of(nn::LanguageModel<double>& model, C&& c) {
  return model.loss(c, kBatch, ids(1), ids(2));
}

}  // namespace

TEST_CASE("The gradient of a GPT with attention dropout is that of its loss", "[dropout][nn]") {
  for (const double dropout : {0.0, 0.2}) {
    auto model = small_gpt(0.4, dropout);
    nn::Context<double> c = context(true);
    CHECK(model.gradient(c, kBatch, ids(1), ids(2)) == loss_of(model, c));
    // One random direction per tensor.
    std::uint64_t stream = 500;
    model.visit(
        [&](const std::string& name, heed::Param<double>& value, heed::Param<double>& grad) {
          const heed::CounterRandom random(kSeed, stream++);
          const heed::Param<double> before = value;
          double along = 0, sides[2];
          for (const int side : {0, 1}) {
            for (Index i = 0; i < value.size(); ++i)
              value[i] = before[i] + (side == 0 ? 1e-5 : -1e-5) * random.normal(std::uint64_t(i));
            sides[side] = loss_of(model, c);
          }
          value = before;
          for (Index i = 0; i < value.size(); ++i)
            along += grad[i] * random.normal(std::uint64_t(i));
          INFO(name << ", dropout " << dropout);
          CHECK(along == Approx((sides[0] - sides[1]) / 2e-5).epsilon(1e-6).margin(1e-8));
        });
  }
}

TEST_CASE("Attention dropout is for training only, and draws anew for each seed and step",
          "[dropout][nn]") {
  auto dropping_model = small_gpt(0.4), plain = small_gpt(0);
  CHECK(loss_of(dropping_model, context(false)) == loss_of(plain, context(false)));
  CHECK(loss_of(plain, context(true)) == loss_of(plain, context(false)));
  const double loss = loss_of(dropping_model, context(true));
  CHECK(loss != loss_of(plain, context(true)));
  CHECK(loss == loss_of(dropping_model, context(true)));
  nn::Context<double> later = context(true), other = context(true);
  ++later.step;
  ++other.seed;
  CHECK(loss != loss_of(dropping_model, later));
  CHECK(loss != loss_of(dropping_model, other));

  // Steps with a cache, outside of training.
  nn::Context<double> c = context(false);
  nn::Matrix<double> whole(kBatch * kLen, kVocabulary), last(kBatch, kVocabulary);
  dropping_model.forward(c, kBatch, ids(1), whole.view());
  auto cache = dropping_model.new_cache(kBatch);
  for (Index t = 0; t < kLen; ++t) {
    const std::vector<Index> all = ids(1);
    dropping_model.step(c, std::vector<Index>{all[std::size_t(t)], all[std::size_t(kLen + t)]},
                        cache, last.view());
    for (Index j = 0; j < kVocabulary; ++j)
      CHECK(last.view().row(1)[j] == Approx(whole.view().row(kLen + t)[j]).margin(1e-12));
  }
}

TEST_CASE("Layers of a model drop different weights, and residual dropout keeps its own",
          "[dropout][nn]") {
  // The same layer under the streams of two blocks.
  nn::ProjectedAttention<heed::ScaledDot<double>> layer(nn::AttentionOptions::even(8, 2), {},
                                                        heed::causal<double>());
  layer.set_dropout(0.4, 1);
  const heed::Dropout first = layer.stage.options(context(true), 1).dropout;
  layer.set_dropout(0.4, 3);
  const heed::Dropout second = layer.stage.options(context(true), 1).dropout;
  CHECK(first.rate == 0.4);
  CHECK(first.seed != second.seed);
  CHECK(layer.stage.options(context(false), 1).dropout.rate == 0);
  CHECK(message_of([&] { layer.set_dropout(1.5, 1); }) ==
        "OpStage::set_dropout: rate is 1.5, it must be in [0, 1)");

  auto model = small_gpt(0.4, 0.1);
  const auto seed_of = [&]<class Op>(std::size_t block, const Op&) {
    const auto& attention = model.blocks()[block].attention();
    const auto& stage = dynamic_cast<const nn::ProjectedAttention<Op>&>(attention).stage;
    return stage.options(context(true), 1).dropout.seed;
  };
  const std::uint64_t plain = seed_of(0, heed::ScaledDot<double>{});
  const std::uint64_t pairs = seed_of(1, heed::Differential<double>{});
  CHECK(plain != pairs);
  const nn::Context<double> c = context(true);
  for (const std::uint64_t residual : {0U, 1U, 2U, 3U, 4U}) {
    const std::uint64_t seed = heed::CounterRandom(c.seed, residual).bits(c.step);
    CHECK((seed != plain && seed != pairs));
  }
  CHECK(model.blocks()[0].stream == 1);
  CHECK(model.blocks()[1].stream == 3);
}
