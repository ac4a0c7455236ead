// SPDX-License-Identifier: Apache-2.0
// Decoding from a paged cache: memory in pages gives the bits of memory in one piece, and steps equal the whole call.

#include "conformance/compare.hpp"
// Sanitizers end the program in their own operator new, where it should throw.
#include "conformance/counting_new.hpp"

#include <heed/explain.hpp>
#include <heed/kv_cache.hpp>
#include <heed/mask/patterns.hpp>

using namespace heed_test;

namespace {

constexpr Needs kNeeds{};

template <class T>
constexpr Index kPage = heed::kPanelLanes<T>;

template <class T>
[[nodiscard]] heed::KvCache<T> cache_of(const Call<T>& call) {
  const Shape &k = call.key.shape(), &v = call.value.shape();
  return {k.batch, k.heads, k.dim, v.dim, kPage<T>};
}

template <class T>
void check_numbers(const Tensor<T>& got, const std::vector<double>& wanted, double allowed) {
  const std::vector<double> out = got.template dense<double>();
  REQUIRE(out.size() == wanted.size());
  double worst = 0;
  for (std::size_t n = 0; n < out.size(); ++n) {
    REQUIRE(std::isfinite(out[n]));
    worst = std::max(worst, std::abs(out[n] - wanted[n]));
  }
  CHECK(worst <= allowed);
}

}  // namespace

TEMPLATE_TEST_CASE("forward over pages has the bits of forward over one piece", "[kv_cache]", float,
                   double) {
  using T = TestType;
  const Index len = 3 * kPage<T> + 5;
  // Tiles of a panel: the page is then no choice of the plan's.
  heed::Options options;
  options.key_tile = 1;
  for (const Index len_q : {Index(1), Index(7), len})
    for (const Runner<T>& runner : all_runners<T, kNeeds>(geometry(2, 4, 2, len_q, len, 8, 8))) {
      Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
      call.mask =
          owned(heed::causal<T>(heed::Align::bottom_right) & heed::window<T>(kPage<T> + 3, 0));
      heed::KvCache<T> cache = cache_of(call);
      cache.append(call.key.view(), call.value.view());
      Tensor<T> whole(call.grad_out.shape()), paged(call.grad_out.shape());
      heed::Inputs<T> in = call.inputs();
      runner.forward(in, call.mask.mask, whole.view(), nullptr, options);
      in.key = cache.keys();
      in.value = cache.values();
      runner.forward(in, call.mask.mask, paged.view(), nullptr, options);
      INFO(runner.name << ", len_q " << len_q);
      CHECK(same_bits(whole.dense(), paged.dense()));
    }
}

TEMPLATE_TEST_CASE("prefill in chunks and single steps equal the whole", "[kv_cache]", float,
                   double) {
  using T = TestType;
  const Index len = 2 * kPage<T> + 9;
  for (const Runner<T>& runner : all_runners<T, kNeeds>(geometry(2, 4, 2, len, len, 8, 8))) {
    if (runner.name == "dialectical-batch") continue;  // a batch that halts together looks ahead
    INFO(runner.name);
    const Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
    const heed::Mask<T> causal = heed::causal<T>(heed::Align::bottom_right);
    Tensor<T> whole(call.grad_out.shape()), steps(call.grad_out.shape());
    runner.forward(call.inputs(), causal, whole.view(), nullptr, {});
    heed::KvCache<T> cache = cache_of(call);
    const auto feed = [&](Index count) {
      const Index done = cache.len();
      cache.append(tokens_of(call.key, done, count), tokens_of(call.value, done, count));
      const auto out = steps.view();
      const heed::TensorView<T> rows{out.row(0, 0, done), {2, 4, count, 8}, out.strides()};
      heed::Inputs<T> in{tokens_of(call.query, done, count), cache.keys(), cache.values(), {}};
      in.first_query = done;
      if (call.extra.given()) in.extra = tokens_of(call.extra, done, count);
      runner.forward(in, causal, rows, nullptr, {});
    };
    const Index chunks[] = {kPage<T> - 3, 1, 2, 17, 1};
    for (Index n = 0; cache.len() < len; ++n) {
      const Index count = std::min(chunks[n % 5], len - cache.len());
      feed(count);
      if (n % 5 != 2) continue;  // thought better of it
      cache.truncate(cache.len() - count);
      feed(1);
    }
    const std::vector<double> wanted = whole.template dense<double>();
    check_numbers(steps, wanted, 64 * tolerance::eps<T> * (1 + largest(wanted)));
  }
}

TEMPLATE_TEST_CASE("a cache grows page by page and moves nothing", "[kv_cache]", float,
                   heed::bfloat16, std::int8_t) {
  heed::KvCache<TestType> cache(1, 2, 3, 5, kPage<float>);
  CHECK(cache.len() == 0);
  CHECK(cache.capacity() == 0);
  CHECK(cache.keys().shape() == Shape{1, 2, 0, 3});
  cache.reserve(1);
  CHECK(cache.capacity() == kPage<float>);
  Tensor<float> key({1, 2, kPage<float>, 3}, Layout::padded),
      value({1, 2, kPage<float>, 5}, Layout::bthd);
  key.randomise(1);
  value.randomise(2);
  cache.append(key.view(), value.view());
  const void* first = rows_of(cache.keys(), 0, 1, 4).data;
  for (int n = 0; n < 3; ++n) cache.append(key.view(), value.view());
  CHECK(rows_of(cache.keys(), 0, 1, 4).data == first);
  CHECK(cache.len() == 4 * kPage<float>);
  const auto holds = [](float has, float given) {
    return std::is_same_v<TestType, float> ? has == given : std::abs(has - given) <= 0.02;
  };
  for (Index n = 0; n < 4; ++n)
    for (Index h = 0; h < 2; ++h)
      for (const Index t : {Index(0), Index(4), kPage<float> - 1}) {
        CHECK(holds(float(cache.keys()(0, h, n * kPage<float> + t, 2)), key(0, h, t, 2)));
        CHECK(holds(float(cache.values()(0, h, n * kPage<float> + t, 4)), value(0, h, t, 4)));
      }
  cache.truncate(2);
  CHECK(cache.len() == 2);
  CHECK(cache.capacity() == 4 * kPage<float>);
}

TEST_CASE("an int8 cache errs by no more than its header says", "[kv_cache]") {
  const Shape rows{2, 2, 90, 24}, queries{2, 4, 1, 24};
  Tensor<float> key(rows), value(rows), query(queries), exact(queries), out(queries);
  key.randomise(1);
  value.randomise(2);
  query.randomise(3);
  for (Index c = 0; c < 24; ++c) key(1, 1, 7, c) *= 40;  // a row of its own size
  heed::KvCache<std::int8_t> cache(2, 2, 24, 24, kPage<float>);
  cache.append(key.view(), value.view());
  const double step = 0.5 + 0x1p-16;
  const heed::ScaledView keys = cache.keys(), values = cache.values();
  for (const auto& [view, from] : {std::pair{&keys, &key}, {&values, &value}})
    for (Index b = 0; b < 2; ++b)
      for (Index h = 0; h < 2; ++h)
        for (Index t = 0; t < 90; ++t) {
          double largest = 0, worst = 0;
          for (Index c = 0; c < 24; ++c) {
            largest = std::max(largest, std::abs(double((*from)(b, h, t, c))));
            worst = std::max(worst,
                             std::abs(double((*view)(b, h, t, c)) - double((*from)(b, h, t, c))));
          }
          const double scale = double(view->scales()(b, h, t, 0));
          CHECK(std::abs(scale - largest / 127) <= 1e-7 * scale);
          CHECK(worst <= step * scale);
        }

  const heed::ScaledDot<float> op;
  heed::forward(op, {query.view(), key.view(), value.view()}, {}, exact.view());
  heed::forward(op, {query.view(), keys, values}, {}, out.view());
  double share = 0;  // largest fraction of the allowed error
  for (Index b = 0; b < 2; ++b)
    for (Index h = 0; h < 4; ++h) {
      double size = 0, logit = 0, value_step = 0;
      for (Index c = 0; c < 24; ++c) size += std::abs(double(query(b, h, 0, c)));
      for (Index t = 0; t < 90; ++t) {
        logit =
            std::max(logit, size / std::sqrt(24.0) * double(keys.scales()(b, h / 2, t, 0)) * step);
        value_step = std::max(value_step, double(values.scales()(b, h / 2, t, 0)) * step);
      }
      for (Index c = 0; c < 24; ++c) {
        double largest = 0;
        for (Index t = 0; t < 90; ++t)
          largest = std::max(largest, std::abs(double(value(b, h / 2, t, c))));
        const double allowed = (std::exp(2 * logit) - 1) * largest + value_step + 1e-5 * largest;
        const double error = std::abs(double(out(b, h, 0, c)) - double(exact(b, h, 0, c)));
        CHECK(error <= allowed);
        share = std::max(share, error / allowed);
      }
    }
  CHECK(share > 0);
}

TEST_CASE(
    "a NaN or an infinity makes NaN of its row of an int8 cache, which shows where it is seen",
    "[kv_cache]") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::nanf("")})
    for (const bool in_key : {true, false}) {
      Tensor<float> key({2, 1, 5, 4}), value({2, 1, 5, 4}), query({2, 1, 1, 4}), out({2, 1, 1, 4}),
          clean({2, 1, 1, 4});
      key.randomise(1);
      value.randomise(2);
      query.randomise(3);
      const auto decode = [&](const heed::Mask<float>& mask, Tensor<float>& to) {
        heed::KvCache<std::int8_t> cache(2, 1, 4, 4, kPage<float>);
        cache.append(key.view(), value.view());
        heed::forward(heed::ScaledDot<float>{}, {query.view(), cache.keys(), cache.values()}, mask,
                      to.view());
      };
      const auto lengths = heed::key_lengths<float>({3, 5});
      decode(lengths, clean);
      (in_key ? key : value)(0, 0, 3, 2) = bad;
      decode(lengths, out);
      CHECK(same_bits(out.dense(), clean.dense()));  // padding may hold anything
      decode({}, out);
      for (Index c = 0; c < 4; ++c) {
        CHECK(std::isnan(out(0, 0, 0, c)));
        CHECK(out(1, 0, 0, c) == clean(1, 0, 0, c));
      }
    }
}

TEST_CASE("an int8 cache takes tokens from every stored type, and refuses its own", "[kv_cache]") {
  Tensor<float> key({1, 2, 3, 4}), value({1, 2, 3, 5});
  key.randomise(1);
  value.randomise(2);
  heed::KvCache<float> floats(1, 2, 4, 5, kPage<float>);
  floats.append(key.view(), value.view());
  heed::KvCache<std::int8_t> once(1, 2, 4, 5, kPage<float>), twice(1, 2, 4, 5, kPage<float>);
  once.append(floats.keys(), floats.values());
  twice.append(once.keys(), once.values());
  for (Index h = 0; h < 2; ++h)
    for (Index t = 0; t < 3; ++t)
      for (Index c = 0; c < 4; ++c) {
        CHECK(twice.keys().numbers()(0, h, t, c) == once.keys().numbers()(0, h, t, c));
        CHECK(std::abs(once.keys()(0, h, t, c) - key(0, h, t, c)) <= 0.01f);
      }
  try {
    once.append(once.keys(), once.values());
    CHECK(false);
  } catch (const std::invalid_argument& e) {
    CHECK(
        std::string(e.what()) ==
        "KvCache::append: key is a view of this cache, which append changes; copy its rows first");
  }
  CHECK(once.len() == 3);
  heed::KvCache<std::int8_t> moved(std::move(once));
  CHECK(moved.len() == 3);
  CHECK(once.len() == 0);
  once.append(key.view(), value.view());
  CHECK(once.keys()(0, 1, 2, 3) == moved.keys()(0, 1, 2, 3));
}

TEST_CASE("a cache and the doors say what does not fit", "[kv_cache]") {
  using heed::KvCache;
  const auto message = [](auto&& action) {
    try {
      action();
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was refused");
  };
  const std::string lanes = std::to_string(kPage<float>);
  CHECK(message([] { KvCache<float>(1, 1, 4, 4, 3); }) ==
        "KvCache: page_rows is 3, it must be a positive multiple of " + lanes);
  CHECK(message([] { KvCache<float>(1, -1, 4, 4); }) ==
        "KvCache: batch 1, kv_heads -1, dim_qk 4, dim_v 4; none may be negative");
  KvCache<float> cache(1, 2, 4, 4, kPage<float>);
  Tensor<float> key({1, 2, 3, 4}), narrow({1, 2, 3, 3}), two({1, 2, 2, 4});
  CHECK(message([&] { cache.append(narrow.view(), key.view()); }) ==
        "KvCache::append: key has shape (1,2,3,3), the cache holds (1,2,n,4)");
  CHECK(message([&] { cache.append(key.view(), two.view()); }) ==
        "KvCache::append: value has len 2, key has 3");
  CHECK(cache.len() == 0);
  cache.append(key.view(), key.view());
  CHECK(message([&] { cache.append(cache.keys(), cache.values()); }) ==
        "KvCache::append: key is a view of this cache, which append changes; copy its rows first");
  CHECK(message([&] {
          cache.append(key.view(), cache.values());
        }).find("value is a view of this") != std::string::npos);
  CHECK(cache.len() == 3);
  CHECK(message([&] { cache.truncate(4); }) ==
        "KvCache::truncate: len is 4, the cache holds 3 tokens");

  // backward() refuses keys and values in pages.
  const heed::ScaledDot<float> op;
  Tensor<float> out({1, 2, 3, 4});
  heed::Saved<float> saved;
  const heed::Inputs<float> in{key.view(), cache.keys(), cache.values(), {}};
  heed::forward(op, in, heed::Mask<float>{}, out.view(), &saved);
  CHECK(message([&] {
          heed::backward(op, in, heed::Mask<float>{}, saved,
                         heed::TensorView<const float>(out.view()),
                         heed::TensorView<const float>(out.view()), heed::Gradients<float>{});
        }) == "heed::backward: key has pages of " + lanes + " rows, it must lie in one piece");
  float* rows[] = {out.view().data()};
  const auto bad = heed::TensorView<const float>::paged(rows, 3, {1, 2, 3, 4}, {24, 12, 4});
  CHECK(message([&] {
          heed::forward(op, {key.view(), bad, key.view(), {}}, heed::Mask<float>{}, out.view());
        }) == "heed::forward: key has pages of 3 rows, they must be multiples of " + lanes);
  const auto own =
      heed::TensorView<const float>::paged(rows, kPage<float>, {1, 2, 3, 4}, {24, 12, 4});
  CHECK(message([&] {
          heed::forward(op, {key.view(), own, key.view(), {}}, heed::Mask<float>{}, out.view());
        }) == "heed::forward: out overlaps key");
}

TEST_CASE("a mask that has the last queries at the first keys is refused", "[kv_cache]") {
  using heed::Align;
  using Mask = heed::Mask<float>;
  const heed::ScaledDot<float> op;
  heed::KvCache<float> cache(1, 2, 4, 4, kPage<float>);
  Tensor<float> tokens({1, 2, 8, 4}), query({1, 2, 1, 4}), out({1, 2, 1, 4}), all({1, 2, 8, 4});
  tokens.randomise(1);
  query.randomise(2);
  cache.append(tokens.view(), tokens.view());
  const auto said = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  const auto decode = [&](const Mask& mask) {
    return said([&] { heed::forward(op, cache.inputs(query.view()), mask, out.view()); });
  };
  const auto refusal = [](const std::string& parts) {
    return "heed::forward: the queries are the last tokens of the keys, len_q is 1 and len_kv is "
           "8; "
           "the mask's " +
           parts + " place them at the first keys, Align::bottom_right at the last ones";
  };
  const auto near = [](auto, auto, auto i, auto j) { return (j <= i) & (i - j < 3); };
  const auto masks = [&](Align at) {
    return std::vector<std::pair<Mask, std::string>>{
        {heed::causal<float>(at), "bands"},
        {heed::window<float>(3, -1, at), "bands"},
        {heed::causal<float>(Align::bottom_right) & heed::window<float>(3, 0, at), "bands"},
        {heed::alibi<float>({0.5F, 0.25F}, at), "slopes"},
        {heed::visible<float>(near, at), "functions of positions"},
        {heed::dilated<float>(2, 2, at), "functions of positions"},
        {heed::prefix_lm<float>({2}, at), "functions of positions"},
        {heed::tree<float>({-1, 0, 1, 2, 3, 4, 5, 6}, at), "functions of positions"},
        {heed::dilated<float>(2, 2, at) | heed::key_range<float>(0, 1), "functions of positions"},
        {!heed::visible<float>(near, at), "functions of positions"},
        {heed::BlockMask<float>(heed::visible<float>(near, at), {1, 2, 2, 2, 1, 8, 4, 4}),
         "functions of positions"},
        {heed::causal<float>(at) | heed::key_range<float>(0, 1), "bands"}};
  };
  for (const auto& at_first_keys : masks(Align::top_left)) {
    const auto& mask = at_first_keys.first;
    const auto& parts = at_first_keys.second;
    CHECK(decode(mask) == refusal(parts));
    // Such a mask is accepted with as many queries as keys, and where the call does not say that
    // its queries are at the end.
    heed::Inputs<float> in = cache.inputs(tokens.view());
    if (parts != "functions of positions")  // a BlockMask has the sizes of a call
      CHECK(said([&] { heed::forward(op, in, mask, all.view()); }).empty());
    in = cache.inputs(query.view());
    in.queries_at_end = false;
    CHECK(said([&] { heed::forward(op, in, mask, out.view()); }).empty());
  }
  for (const auto& [mask, parts] : masks(Align::bottom_right)) CHECK(decode(mask).empty());

  // An offset is obeyed; parts that place no queries have none.
  CHECK(decode(heed::alibi<float>({0.5F, 0.25F}, Align::top_left, 7)).empty());
  heed::forward(op, cache.inputs(query.view()), heed::causal<float>(Align::bottom_right),
                out.view());
  const auto wanted = out.dense();
  CHECK(decode(heed::causal<float>(Align::top_left, 7)).empty());
  CHECK(same_bits(out.dense(), wanted));
  CHECK(decode(heed::visible<float>(near, Align::top_left, 7)).empty());
  const bool shown[8] = {true, false, true};
  for (const Mask& mask :
       {Mask{}, heed::window<float>(-1, -1), heed::key_range<float>(2, 5),
        heed::key_lengths<float>({6}), heed::boolean<float>({shown, Shape{1, 1, 1, 8}}),
        heed::documents<float>({1}, {0, 0, 0, 1, 1, 1, 1, 1}), heed::soft_cap<float>(2),
        heed::block_lists<float>({1, 4, {0, 1}, {1}}), !heed::key_range<float>(2, 5)})
    CHECK(decode(mask).empty());

  heed::Geometry g{1, 2, 2, 2, 1, 8, 4, 4};
  g.queries_at_end = true;
  CHECK(said([&] { (void)heed::explain(op, g, heed::causal<float>()); }) ==
        "heed::explain" + refusal("bands").substr(13));
  // backward() of the same queries and keys as tensors.
  heed::Saved<float> saved;
  heed::Inputs<float> in = cache.inputs(query.view());
  const Mask last = heed::causal<float>(Align::bottom_right);
  heed::forward(op, in, last, out.view(), &saved);
  in = {query.view(), tokens.view(), tokens.view()};
  in.first_query = 7;
  Tensor<float> grad({1, 2, 1, 4});
  const auto back = [&](const Mask& mask) {
    const heed::TensorView<const float> rows = out.view();
    return said([&] { heed::backward(op, in, mask, saved, rows, rows, {.query = grad.view()}); });
  };
  CHECK(back(last).empty());
  in.queries_at_end = true;
  CHECK(back(last).empty());
  CHECK(back(heed::causal<float>()) == "heed::backward" + refusal("bands").substr(13));
}

TEST_CASE("a cache that was moved from is empty, and can be used again", "[kv_cache]") {
  Tensor<float> key({1, 2, 3, 4}), value({1, 2, 3, 5}), query({1, 2, 3, 4}), out({1, 2, 3, 5});
  key.randomise(1);
  value.randomise(2);
  query.randomise(3);
  const auto check_empty = [&](const heed::KvCache<float>& cache) {
    CHECK(cache.len() == 0);
    CHECK(cache.capacity() == 0);
    CHECK(cache.keys().shape() == Shape{1, 2, 0, 4});
    CHECK(cache.values().shape() == Shape{1, 2, 0, 5});
    heed::forward(heed::ScaledDot<float>{}, {query.view(), cache.keys(), cache.values(), {}},
                  heed::Mask<float>{}, out.view());
    CHECK(largest(out.dense<double>()) == 0);  // no key, no output
  };
  heed::KvCache<float> from(1, 2, 4, 5, kPage<float>);
  from.append(key.view(), value.view());
  const float* row = from.keys().row(0, 1, 2);
  heed::KvCache<float> built(std::move(from));
  check_empty(from);
  CHECK(built.len() == 3);
  CHECK(built.keys().row(0, 1, 2) == row);

  heed::KvCache<float> assigned(1, 2, 4, 5, 2 * kPage<float>);
  assigned.append(key.view(), value.view());
  assigned = std::move(built);
  check_empty(built);
  CHECK(assigned.keys().row(0, 1, 2) == row);
  auto& same = assigned;
  assigned = std::move(same);
  CHECK(assigned.len() == 3);
  CHECK(assigned.keys().row(0, 1, 2) == row);

  from.append(key.view(), value.view());
  CHECK(from.len() == 3);
  CHECK(from.keys()(0, 1, 2, 3) == key(0, 1, 2, 3));
}

TEST_CASE(
    "a cache of no batch, no heads, no columns or no new tokens works, and sizes that overflow are "
    "refused",
    "[kv_cache]") {
  for (const Shape shape :
       {Shape{0, 2, 3, 4}, Shape{1, 0, 3, 4}, Shape{1, 2, 3, 0}, Shape{1, 2, 0, 4}}) {
    heed::KvCache<float> cache(shape.batch, shape.heads, shape.dim, shape.dim);
    const heed::TensorView<const float> none(nullptr, shape);
    cache.append(none, none);
    CHECK(cache.len() == shape.len);
    CHECK(cache.keys().shape() == shape);
    cache.truncate(0);
    CHECK(cache.values().shape() == Shape{shape.batch, shape.heads, 0, shape.dim});
  }
  const Index most = std::numeric_limits<Index>::max();
  const auto message = [](auto&& action) {
    try {
      action();
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    } catch (const std::bad_alloc&) {
      return std::string("no memory");
    }
    return std::string("nothing was refused");
  };
  CHECK(message([&] {
          heed::KvCache<float>(1, 1, most / 512, most / 512);
        }).find("KvCache: a page of ") == 0);
  heed::KvCache<float> cache(0, 1, 4, 4);
  const heed::TensorView<const float> three(nullptr, {0, 1, 3, 4}),
      huge(nullptr, {0, 1, most, 4}, {0, 0, 0});
  cache.append(three, three);
  CHECK(message([&] { cache.append(huge, huge); }) ==
        "KvCache::append: 9223372036854775807 tokens after 3 overflow a 64-bit index");
  CHECK(message([&] { cache.reserve(most); }) == "no memory");
  CHECK(message([&] { cache.reserve(-5); }) ==
        "KvCache::reserve: len is -5, it must not be negative");
  CHECK(cache.len() == 3);
}
