// SPDX-License-Identifier: Apache-2.0
// Key features that a cache keeps give the bits of calls that compute them again, whatever happens
// to the cache between calls.

#include "conformance/compare.hpp"
#include "message_of.hpp"
#include "turned_scores.hpp"

#include <heed/kv_cache.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/plug/own_score.hpp>

#include <atomic>

using namespace heed_test;
namespace nn = heed::nn;

namespace {

constexpr Needs kNeeds{};
constexpr Index kPage = heed::kPanelLanes<float>;

// Runs forward() twice for the last `queries` tokens of a cache of (2, 2, len, dim): with the
// cache's features, and with its keys and values alone.
template <class Run, class Stored, class T>
void check_same(const Run& run, heed::KvCache<Stored>& cache, const Call<T>& call, Index queries) {
  const heed::Options options{.threads = queries % 2 == 0 ? 3 : 1, .key_tile = 1};
  const auto query = tokens_of(call.query, cache.len() - queries, queries);
  heed::StoredView<const T> extra;
  if (call.extra.given()) extra = tokens_of(call.extra, cache.len() - queries, queries);
  Shape shape = call.grad_out.shape();
  shape.len = queries;
  Tensor<T> kept(shape), anew(shape);
  const auto causal = heed::causal<T>(heed::Align::bottom_right);
  run(cache.inputs(query, extra), causal, kept.view(), options);
  run({query, cache.keys(), cache.values(), extra}, causal, anew.view(), options);
  INFO("tokens " << cache.len() << ", queries " << queries);
  CHECK(same_bits(kept.dense(), anew.dense()));
}

template <class Stored, class T>
void append(heed::KvCache<Stored>& cache, const Call<T>& call, Index count) {
  cache.append(tokens_of(call.key, cache.len(), count), tokens_of(call.value, cache.len(), count));
}

// A sequence that grows over several pages, by prompts and single tokens, and is cut twice; the
// tokens that follow differ from those cut off.
template <class Stored, class Run, class T>
void check_sequence(const Run& run, const Call<T>& call, const Call<T>& other) {
  const Shape &k = call.key.shape(), &v = call.value.shape();
  heed::KvCache<Stored> cache(k.batch, k.heads, k.dim, v.dim, heed::kPanelLanes<T>);
  const auto feed = [&](const Call<T>& of, Index count) {
    append(cache, of, count);
    check_same(run, cache, of, count);
  };
  for (const Index count : {heed::kPanelLanes<T> - 3, Index(1), Index(1), Index(19), Index(1)})
    feed(call, count);
  cache.truncate(cache.len() - 5);
  for (const Index count : {1, 1, 6, 1}) feed(other, count);
  cache.truncate(2);
  append(cache, call, 30);
  check_same(run, cache, call, 1);
  heed::KvCache<Stored> moved(std::move(cache));
  append(moved, other, 1);
  check_same(run, moved, other, 1);
  append(cache, other, 4);  // a moved-from cache is as new
  check_same(run, cache, other, 1);
}

template <class Op>
[[nodiscard]] auto runner_of(const Op& op) {
  using T = typename Op::Scalar;
  return [op](const heed::Inputs<T>& in, const heed::Mask<T>& mask, const heed::TensorView<T>& out,
              const heed::Options& options) { heed::forward(op, in, mask, out, nullptr, options); };
}

template <class Stored, class Op>
void check_op(const Op& op, const Geometry& g = geometry(2, 4, 2, 90, 90, 8, 8)) {
  using T = typename Op::Scalar;
  check_sequence<Stored>(runner_of(op), random_call<T>(g, 0), random_call<T>(g, 0, 2));
}

// Counts the rows for which its feature is computed, a vector of them at a time.
struct CountedNorm {
  static inline std::atomic<int> asked{0};
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row) {
    ++asked;
    return heed::SquaredNorm::of<S>(row);
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S& f, const S& df, const Add& add) {
    heed::SquaredNorm::vjp(row, f, df, add);
  }
};
template <class T>
struct Counted {
  using Features = heed::KeyRows<CountedNorm>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit - pair.key[0];
  }
};

// Features that depend on a member of theirs, which no promise covers.
struct ScaledNorms : heed::SquaredKeyNorms {
  double factor = 2;
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = heed::SquaredNorm::of<S>(row) * heed::math::constant<S>(factor);
  }
};
template <class T>
struct Scaled {
  using Features = ScaledNorms;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit - pair.key[0];
  }
};

// Inherits the promise of a score, not its features.
template <class T>
struct LouderDar : heed::DarScore<T> {
  T loudness = T(1);
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    heed::DarScore<T>::key_features_of(row, f);
    f[0] = f[0] * heed::math::constant<S>(double(loudness));
  }
};

// DAR in both maps of differential attention: derived values of each query head.
template <class T>
using TwoResonances = heed::Attention<T, heed::DarScore<T>,
                                      heed::Difference<T, heed::GivenLambda<T>>, heed::Identity<T>>;

template <class Op>
struct Decoder {
  Op op;
  Call<float> call = random_call<float>(geometry(2, 4, 2, 90, 90, 8, 8), 0);
  heed::KvCache<float> cache{2, 2, 8, 8, kPage};

  explicit Decoder(Op of) : op(std::move(of)) { append(cache, call, 40); }
  [[nodiscard]] heed::TensorView<const float> query() const { return tokens_of(call.query, 39, 1); }
  void decode() { decode(op, cache.inputs(query())); }
  void decode(const auto& of, const heed::Inputs<float>& in) {
    Tensor<float> out({2, 4, 1, 8});
    heed::forward(of, in, {}, out.view());
  }
};

}  // namespace

TEMPLATE_TEST_CASE("every variant decodes from kept features with the bits of new ones",
                   "[key_features]", float, double) {
  using T = TestType;
  for (const bool per_head : {false, true})
    for (const Runner<T>& runner :
         all_runners<T, kNeeds>(geometry(2, 4, 2, 90, 90, 8, 8), per_head)) {
      if (runner.reads_own_rows) continue;
      INFO(runner.name);
      check_sequence<T>(
          [&](const heed::Inputs<T>& in, const heed::Mask<T>& mask, const heed::TensorView<T>& out,
              const heed::Options& options) { runner.forward(in, mask, out, nullptr, options); },
          random_call<T>(runner.geometry, runner.extra_dim),
          random_call<T>(runner.geometry, runner.extra_dim, 2));
    }
}

TEMPLATE_TEST_CASE("features are kept whatever rows are stored as", "[key_features]",
                   heed::bfloat16, heed::half, std::int8_t) {
  heed::Dar<float> low_rank;
  low_rank.score.basis = heed_test::detail::reflected_basis<float>(8, 3);
  low_rank.score.adaptive = true;
  check_op<TestType>(low_rank);
  check_op<TestType>(heed::ResonantOde<float>{});
}

TEST_CASE("features of each map are kept apart", "[key_features]") {
  check_op<float>(TwoResonances<float>{});
  check_op<float>(TwoResonances<float>{}, geometry(2, 2, 2, 90, 90, 8, 8));
}

TEST_CASE("a feature of a key is asked for once", "[key_features]") {
  Decoder<heed::OwnAttention<Counted, float>> decoder({});
  decoder.decode();
  CHECK(decoder.cache.key_features().len() == 40);
  CHECK(CountedNorm::asked > 0);
  CountedNorm::asked = 0;
  decoder.decode();
  // Each call looks once at the numbers of tokens that the feature reads, of no key.
  CHECK(CountedNorm::asked == 1);
  CountedNorm::asked = 0;
  append(decoder.cache, decoder.call, 1);
  decoder.decode();
  CHECK(CountedNorm::asked == 1 + 4);  // four: two batches and two heads
  decoder.cache.forget_features();
  CHECK(decoder.cache.key_features().bytes() == 0);
  decoder.decode();
  CHECK(decoder.cache.key_features().len() == 41);
}

TEST_CASE("features are kept where a score promises what they depend on", "[key_features]") {
  using heed::kept_features;
  static_assert(kept_features<heed::OwnScore<Counted, float>>);
  static_assert(!kept_features<heed::OwnScore<Scaled, float>>);
  static_assert(!kept_features<LouderDar<float>>);
  const auto check = [](auto op, auto&& change) {
    Decoder decoder(op);
    decoder.decode();
    CHECK(decoder.cache.key_features().len() == 0);
    change(op);
    check_same(runner_of(op), decoder.cache, decoder.call, 1);
  };
  check(heed::OwnAttention<Scaled, float>{}, [](auto& op) { op.score.factor = 3; });
  check(heed::Attention<float, LouderDar<float>, heed::Softmax<float>, heed::Identity<float>>{},
        [](auto& op) { op.score.loudness = 3; });
  Decoder<heed::ScaledDot<float>> plain({});
  plain.decode();
  CHECK(plain.cache.key_features().bytes() == 0);
}

TEST_CASE("features of another op, of other numbers, heads or keys are refused", "[key_features]") {
  heed::Dar<float> dar;
  dar.score.basis = heed_test::detail::reflected_basis<float>(8, 3);
  Decoder decoder(dar);
  decoder.decode();
  heed::KvCache<float>& cache = decoder.cache;
  const auto refused = [&](const auto& op, const heed::Inputs<float>& in) {
    return message_of([&] { decoder.decode(op, in); });
  };
  const std::string op = "heed::forward: ", begin = op + "key_features ",
                    kept = ", the key_features that are kept are of an op with ",
                    end = "; KvCache::forget_features() makes room for those of this call";
  CHECK(refused(heed::ResonantOde<float>{}, cache.inputs(decoder.query())) ==
        begin + "are those of another op" + end);
  const char* differences[] = {"feature_numbers()[0] is 0.001", "feature_numbers()[1] is 1",
                               "feature_numbers()[2] is 1", "projection has 16 values"};
  const char* of_kept[] = {"1e-08", "0", "0", "24"};
  for (std::size_t n = 0; n < 4; ++n) {
    heed::Dar<float> other = dar;
    if (n == 0) other.score.eps = 1e-3;
    if (n == 1) other.score.zero_norm = heed::ZeroNorm::safe;
    if (n == 2) other.score.adaptive = true;
    if (n == 3) other.score.basis = heed_test::detail::reflected_basis<float>(8, 2);
    INFO(n);
    CHECK(refused(other, cache.inputs(decoder.query())) ==
          op + differences[n] + kept + of_kept[n] + end);
  }
  heed::KvCache<float> twin(2, 2, 8, 8, kPage);
  append(twin, decoder.call, 40);
  heed::Inputs<float> in = cache.inputs(decoder.query());
  in.key = twin.keys();
  CHECK(refused(dar, in) == begin + "are of keys at another address" + end);
  const Tensor<float> narrow({2, 2, 40, 6}), query({2, 4, 1, 6});
  in.query = query.view();
  in.key = narrow.view();
  CHECK(refused(heed::Dar<float>{}, in) ==
        begin +
            "are of keys (batch, kv_heads, len, dim_qk) with batch 2, kv_heads 2 and dim_qk 8, "
            "these have 2, 2 and 6" +
            end);
  // A refusal changes nothing, and learnt numbers do not matter.
  CHECK(cache.key_features().len() == 40);
  dar.score.strength = {0.1F, 0.2F, 0.3F, 0.4F};
  check_same(runner_of(dar), cache, decoder.call, 1);
  cache.forget_features();
  check_same(runner_of(heed::ResonantOde<float>{}), cache, decoder.call, 1);
  CHECK(cache.key_features().len() == 40);

  // Categories belong to query heads and to the prototypes.
  heed::Prototype<float> prototypes = heed::make_prototype<float>(decoder.call.geometry, 3);
  for (Index i = 0; i < prototypes.score.W.size(); ++i)
    prototypes.score.W[i] = float(std::sin(double(i)));
  Decoder categories(prototypes);
  categories.decode();
  prototypes.score.W[1] += 1;
  CHECK(message_of([&] {
          categories.decode(prototypes, categories.cache.inputs(categories.query()));
        }).find(op + "table[1] is ") == 0);
  heed::Prototype<float> two = heed::make_prototype<float>(geometry(2, 2, 2, 90, 90, 8, 8), 3);
  Tensor<float> out({2, 2, 1, 8});
  CHECK(message_of([&] {
          heed::forward(two, categories.cache.inputs(tokens_of(Tensor<float>({2, 2, 1, 8}), 0, 1)),
                        {}, out.view());
        }) == begin + "are of 4 heads, the call has 2" + end);

  // Learnt parameters that change rows of keys are named, whether keys then differ by head or not.
  heed::OwnAttention<Turned, float> turned;
  Decoder turns(turned);
  turns.decode();
  const auto with_bases = [&](heed::Param<float> log_base) {
    turned.score.log_base = std::move(log_base);
    return message_of([&] { turns.decode(turned, turns.cache.inputs(turns.query())); });
  };
  CHECK(with_bases({1, 2, 3, 4}) == op + "log_base has 4 values" + kept + "1" + end);
  CHECK(with_bases(8.0F) == op + "log_base[0] is 8" + kept + "9.2103405" + end);
  CHECK(with_bases({1, 2}) ==
        op + "log_base has 2 values, the call has 4 heads; it needs 1 value, or one per head");
}

TEST_CASE("a call on views from before a cache was cut leaves no features of what was cut",
          "[key_features]") {
  Decoder decoder(heed::Dar<float>{});
  const heed::Inputs<float> before = decoder.cache.inputs(decoder.query());
  decoder.cache.truncate(10);
  decoder.decode(decoder.op, before);
  const Call<float> other = random_call<float>(decoder.call.geometry, 0, 2);
  append(decoder.cache, other, 20);
  check_same(runner_of(decoder.op), decoder.cache, other, 1);
}

TEST_CASE("a layer decodes on when its op changes between two tokens", "[key_features]") {
  const Index width = 16, held = 5;
  Tensor<float> x({1, 1, held + 1, width});
  x.randomise(3);
  nn::Context<float> c;
  c.threads = 1;
  const auto row = [&](Index t) {
    return nn::MatrixView<const float>(x.view().row(0, 0, t), 1, width);
  };
  for (const std::string name : {"dar", "prototype", "sdpa"}) {
    INFO(name);
    // The last token of a layer whose op changes before it, over the keys of all tokens.
    const auto last = [&](bool decodes) {
      const auto layer = nn::attention_by_name<float>(name, width, 2, 0);
      Index position = 0;
      layer->visit([&](const std::string&, heed::Param<float>& weight, heed::Param<float>&) {
        for (Index i = 0; i < weight.size(); ++i) weight[i] += float(std::sin(++position));
      });
      const auto change = [&] {
        layer->visit([&](const std::string& of, heed::Param<float>& weight, heed::Param<float>&) {
          if (of == "W")
            for (Index i = 0; i < weight.size(); ++i) weight[i] = -weight[i];
        });
        if (auto* dar = dynamic_cast<nn::ProjectedAttention<heed::Dar<float>>*>(layer.get()))
          dar->stage.op.score.eps = 1;
      };
      heed::KvCache<float> cache = layer->new_cache(1);
      nn::Matrix<float> y(1, width);
      if (!decodes) change();
      for (Index t = 0; t < held; ++t) layer->step(c, 1, row(t), y.view(), cache);
      CHECK((cache.key_features().len() == held) == (name != "sdpa"));
      if (decodes) change();
      layer->step(c, 1, row(held), y.view(), cache);
      return std::vector<float>(y.view().row(0), y.view().row(0) + width);
    };
    CHECK(same_bits(last(true), last(false)));
  }
}
