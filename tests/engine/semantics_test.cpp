// SPDX-License-Identifier: Apache-2.0
// Properties of every variant beside right numbers: rows that see no key, garbage at hidden places,
// NaN, huge numbers, causality, and the laws of weights.

#include "conformance/compare.hpp"

#include <heed/check/causality.hpp>

using namespace heed_test;
using heed::Align;

namespace {

constexpr Needs kNeeds{.backward = true};
template <class T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// Calls f(runner, call) for every variant, with small tiles, so that 33 tokens cross several.
template <class T, class F>
void for_calls(const Geometry& g, F&& f) {
  for (const Runner<T>& runner : runners<T, kNeeds>(g)) {
    INFO(runner.name << " in " << (sizeof(T) == 4 ? "float" : "double") << ", "
                     << describe(runner.geometry));
    Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
    call.options = small_tiles();
    f(runner, call);
  }
}

template <class T>
[[nodiscard]] bool all_positive_zero(const std::vector<T>& x) {
  return std::all_of(x.begin(), x.end(), [](T v) { return v == T(0) && !std::signbit(v); });
}
[[nodiscard]] bool all_zero(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return v == 0; });
}
[[nodiscard]] bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}

[[nodiscard]] const std::vector<double>& gradient(const Named& named, const std::string& name) {
  for (const heed::NamedTensor& tensor : named)
    if (tensor.name == name) return tensor.values;
  throw std::invalid_argument("no gradient of " + name);
}

void check_same_gradients(const Named& a, const Named& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t t = 0; t < a.size(); ++t) {
    INFO("gradient of " << a[t].name);
    CHECK(same_bits(a[t].values, b[t].values));
  }
}

// Sets all columns of token t, in every batch and head.
template <class T>
void set_token(Tensor<T>& x, Index t, T value) {
  for (Index b = 0; b < x.shape().batch; ++b)
    for (Index h = 0; h < x.shape().heads; ++h)
      for (Index c = 0; c < x.shape().dim; ++c) x(b, h, t, c) = value;
}

// The rows of tokens [first, last) of all heads.
template <class T>
[[nodiscard]] std::vector<T> tokens(const Tensor<T>& x, Index first, Index last) {
  std::vector<T> rows;
  for (Index b = 0; b < x.shape().batch; ++b)
    for (Index h = 0; h < x.shape().heads; ++h)
      for (Index t = first; t < last; ++t)
        for (Index c = 0; c < x.shape().dim; ++c) rows.push_back(x(b, h, t, c));
  return rows;
}
[[nodiscard]] std::vector<double> tokens(const std::vector<double>& dense, const Shape& s,
                                         Index first, Index last) {
  std::vector<double> rows;
  for (Index n = 0; n < Index(dense.size()); ++n)
    if (const Index t = n / s.dim % s.len; t >= first && t < last)
      rows.push_back(dense[std::size_t(n)]);
  return rows;
}

}  // namespace

TEMPLATE_TEST_CASE("a row that sees no key mixes to +0, has lse -infinity and passes no gradient",
                   "[semantics]", float, double) {
  // Rows i % 3 == 1 see nothing, in every way that hides a row.
  const Geometry g = geometry(2, 2, 1, 21, 21, 4, 4);
  const auto blind = [](Index i) { return i % 3 == 1; };
  const auto boolean = boolean_mask<TestType>(
      {1, 1, 21, 21}, [&](Index, Index, Index i, Index) { return !blind(i); });
  OwnedMask<TestType> bias = random_bias<TestType>({1, 1, 21, 21}, 3);
  for (Index i = 0; i < 21; ++i)
    for (Index j = 0; j < 21; ++j)
      if (blind(i)) (*bias.bias)(0, 0, i, j) = -kInf<TestType>;
  for (const auto& mask : {boolean, bias})
    for_calls<TestType>(g, [&](const auto& runner, auto& call) {
      call.mask = mask;
      const auto result = forward(runner, call);
      const std::vector<TestType>& rows =
          result.saved.mixed.empty() ? result.out.dense() : result.saved.mixed;
      const bool zero_stays_zero = !result.saved.mixed.empty() || runner.name != "prototype";
      for (Index r = 0; r < runner.geometry.query_rows(); ++r) {
        if (!blind(r % 21)) continue;
        for (int m = 0; m < runner.maps; ++m)
          CHECK(result.saved.lse[std::size_t(m * runner.geometry.query_rows() + r)] ==
                -kInf<TestType>);
        if (zero_stays_zero)
          CHECK(all_positive_zero(
              std::vector<TestType>(rows.begin() + r * 4, rows.begin() + r * 4 + 4)));
      }
      // Without gradients from rows that see a key, only those of a readout remain.
      Call<TestType> only = call;
      for (Index i = 0; i < 21; ++i)
        if (!blind(i)) set_token(only.grad_out, i, TestType(0));
      const Named grads = backward(runner, only, result);
      for (const char* name : {"key", "value"})
        if (!runner.reads_own_rows) {
          INFO("gradient of " << name);
          CHECK(all_zero(gradient(grads, name)));
        }
      for (const auto& tensor : grads) {
        INFO("gradient of " << tensor.name);
        CHECK(all_finite(tensor.values));
        const bool of_readout = tensor.name.rfind("readout", 0) == 0 || tensor.name == "score.W";
        const bool row_of_readout = tensor.name == "query" || tensor.name == "extra";
        const bool own = runner.reads_own_rows && (tensor.name == "key" || tensor.name == "value");
        if (runner.plain_rows || !(of_readout || row_of_readout || own))
          CHECK(all_zero(tensor.values));
      }
    });
}

TEMPLATE_TEST_CASE("NaN in a query that sees nothing stays in its own row", "[semantics]", float,
                   double) {
  const auto mask = boolean_mask<TestType>({1, 1, 21, 21},
                                           [](Index, Index, Index i, Index) { return i % 3 != 1; });
  for (const bool capped : {false, true})
    for_calls<TestType>(geometry(2, 2, 1, 21, 21, 4, 4), [&](const auto& runner, auto& call) {
      call.mask = capped ? mask & owned(heed::soft_cap<TestType>(TestType(2))) : mask;
      const auto clean = forward(runner, call);
      const Named clean_grads = backward(runner, call, clean);
      Call<TestType> dirty = call;
      set_token(dirty.query, 7, kNan<TestType>);
      const auto result = forward(runner, dirty);
      CHECK(same_bits(tokens(result.out, 0, 7), tokens(clean.out, 0, 7)));
      CHECK(same_bits(tokens(result.out, 8, 21), tokens(clean.out, 8, 21)));
      const Named grads = backward(runner, dirty, result);
      for (const char* name : {"key", "value"})
        CHECK((runner.reads_own_rows ||
               same_bits(gradient(grads, name), gradient(clean_grads, name))));
      if (runner.plain_rows) {
        CHECK(same_bits(result.out.dense(), clean.out.dense()));
        check_same_gradients(grads, clean_grads);
      }
    });
}

TEMPLATE_TEST_CASE("a call in which no row sees a key has no gradient through the mix",
                   "[semantics]", float, double) {
  for_calls<TestType>(geometry(2, 2, 1, 9, 9, 4, 4), [](const auto& runner, auto& call) {
    call.mask = owned(heed::key_lengths<TestType>({0, 0}));
    const auto result = forward(runner, call);
    const Named grads = backward(runner, call, result);
    if (runner.plain_rows) {
      CHECK(all_positive_zero(result.out.dense()));
      for (const auto& tensor : grads) CHECK(all_zero(tensor.values));
    }
    for (const auto& tensor : grads) CHECK(all_finite(tensor.values));
  });
}

TEMPLATE_TEST_CASE("what stands at a hidden position changes no bit of outputs and gradients",
                   "[semantics]", float, double) {
  // Keys 3, 4, 17 and those from 27 on are hidden from every query, in every way that hides.
  const Index len = 33;
  const Geometry g = geometry(2, 2, 1, len, len, 6, 6);
  const auto hidden = [](Index j) { return j == 3 || j == 4 || j == 17 || j >= 27; };
  std::vector<OwnedMask<TestType>> masks;
  for (const Index rows : {Index(1), len})
    masks.push_back(boolean_mask<TestType>(
        {1, 1, rows, len}, [&](Index, Index, Index, Index j) { return !hidden(j); }));
  OwnedMask<TestType> bias = random_bias<TestType>({1, 2, len, len}, 5);
  OwnedMask<TestType> key_bias = random_bias<TestType>({2, 1, 1, len}, 6);
  std::vector<Index> queries(std::size_t(2 * len), 1), keys(std::size_t(2 * len), 1);
  for (Index j = 0; j < len; ++j) {
    if (!hidden(j)) continue;
    for (Index h = 0; h < 2; ++h)
      for (Index i = 0; i < len; ++i) (*bias.bias)(0, h, i, j) = -kInf<TestType>;
    for (Index b = 0; b < 2; ++b) {
      (*key_bias.bias)(b, 0, 0, j) = -kInf<TestType>;
      keys[std::size_t(b * len + j)] = 2;
    }
  }
  masks.push_back(bias);
  masks.push_back(key_bias);
  masks.push_back(owned(heed::documents<TestType>(queries, keys)));
  const auto causal = owned(heed::causal<TestType>());
  const std::size_t plain = masks.size();
  for (std::size_t m = 0; m < plain; ++m) masks.push_back(masks[m] & causal);
  masks.push_back(masks[0] & owned(heed::soft_cap<TestType>(TestType(2))));
  masks.push_back(masks[2] & random_alibi<TestType>(g, Align::top_left));

  for (std::size_t m = 0; m < masks.size(); ++m)
    for (const bool small : {true, false})
      for_calls<TestType>(g, [&](const auto& runner, auto& call) {
        INFO("mask " << m);
        if (runner.reads_own_rows) return;  // the readout sees every token: next test
        if (!small) call.options = {.threads = 1};
        call.mask = masks[m];
        const auto clean = forward(runner, call);
        const Named clean_grads = backward(runner, call, clean);
        for (const TestType garbage : {kNan<TestType>, kInf<TestType>, -kInf<TestType>,
                                       std::numeric_limits<TestType>::max()}) {
          INFO("garbage " << garbage);
          Call<TestType> dirty = call;
          for (Index j = 0; j < len; ++j) {
            if (!hidden(j)) continue;
            set_token(dirty.key, j, garbage);
            set_token(dirty.value, j, garbage);
          }
          const auto result = forward(runner, dirty);
          CHECK(same_bits(result.out.dense(), clean.out.dense()));
          CHECK(same_bits(result.saved.lse, clean.saved.lse));
          check_same_gradients(backward(runner, dirty, result), clean_grads);
        }
        for (const char* name : {"key", "value"}) {
          const Tensor<TestType>& x = name[0] == 'k' ? call.key : call.value;
          for (Index j = 0; j < len; ++j)
            if (hidden(j))
              CHECK(all_zero(tokens(gradient(clean_grads, name), x.shape(), j, j + 1)));
        }
      });
}

TEMPLATE_TEST_CASE(
    "NaN in a token that a causal mask hides from earlier rows reaches later rows only",
    "[semantics]", float, double) {
  const Index len = 33, at = 19;
  for (const char* where : {"query", "key", "value"})
    for_calls<TestType>(geometry(2, 2, 1, len, len, 6, 6), [&](const auto& runner, auto& call) {
      INFO("NaN in " << where);
      call.mask = owned(heed::causal<TestType>());
      const auto clean = forward(runner, call);
      const Named clean_grads = backward(runner, call, clean);
      Call<TestType> dirty = call;
      Tensor<TestType>& x = where[0] == 'q'   ? dirty.query
                            : where[0] == 'k' ? dirty.key
                                              : dirty.value;
      set_token(x, at, kNan<TestType>);
      const auto result = forward(runner, dirty);
      CHECK(same_bits(tokens(result.out, 0, at), tokens(clean.out, 0, at)));
      const Index last = where[0] == 'q' ? at + 1 : len;
      for (const TestType v : tokens(result.out, at, last)) CHECK(std::isnan(v));
      CHECK(same_bits(tokens(result.out, last, len), tokens(clean.out, last, len)));
      // Gradients of the queries before it come from rows that do not see it.
      const Named grads = backward(runner, dirty, result);
      const Shape& s = call.query.shape();
      CHECK(same_bits(tokens(gradient(grads, "query"), s, 0, at),
                      tokens(gradient(clean_grads, "query"), s, 0, at)));
      // Later keys and values have gradients from rows that see it.
      const auto later = tokens(gradient(grads, "key"), call.key.shape(), at, at + 1);
      CHECK(std::any_of(later.begin(), later.end(), [](double v) { return std::isnan(v); }));
      // No query of the mask's other side sees a token behind it: a NaN in a query makes no later key NaN.
      if (where[0] == 'q')
        for (const Tensor<TestType>* side : {&call.key, &call.value})
          CHECK(all_finite(tokens(gradient(grads, side == &call.key ? "key" : "value"),
                                  side->shape(), at + 1, len)));
    });
}

TEMPLATE_TEST_CASE("NaN in a visible key or value makes exactly the rows that see it NaN",
                   "[semantics]", float, double) {
  // A window of three: rows at - 1, at and at + 1 see token `at`.
  const Index len = 33, at = 16;
  for (const char* where : {"key", "value"})
    for_calls<TestType>(geometry(1, 2, 2, len, len, 6, 6), [&](const auto& runner, auto& call) {
      INFO("NaN in " << where);
      call.mask = owned(heed::window<TestType>(1, 1));
      const auto clean = forward(runner, call);
      Tensor<TestType>& x = where[0] == 'k' ? call.key : call.value;
      set_token(x, at, kNan<TestType>);
      const auto result = forward(runner, call);
      for (const TestType v : tokens(result.out, at - 1, at + 2)) CHECK(std::isnan(v));
      CHECK(same_bits(tokens(result.out, 0, at - 1), tokens(clean.out, 0, at - 1)));
      CHECK(same_bits(tokens(result.out, at + 2, len), tokens(clean.out, at + 2, len)));
      const Named grads = backward(runner, call, result);
      // Queries two tokens away share no key with the row whose gradient is NaN.
      CHECK(all_finite(tokens(gradient(grads, "query"), call.query.shape(), 0, at - 1)));
      CHECK(all_finite(tokens(gradient(grads, "query"), call.query.shape(), at + 2, len)));
      CHECK(all_finite(tokens(gradient(grads, "key"), call.key.shape(), 0, at - 2)));
      CHECK(all_finite(tokens(gradient(grads, "value"), call.value.shape(), at + 3, len)));
    });
}

TEMPLATE_TEST_CASE("an infinite visible value is not turned into a number", "[semantics]", float,
                   double) {
  for_calls<TestType>(geometry(1, 2, 2, 20, 20, 6, 6), [](const auto& runner, auto& call) {
    call.mask = owned(heed::window<TestType>(1, 1));
    const auto clean = forward(runner, call);
    set_token(call.value, 9, kInf<TestType>);
    const auto result = forward(runner, call);
    const auto& rows = result.saved.mixed.empty() ? result.out.dense() : result.saved.mixed;
    for (Index r = 0; r < runner.geometry.query_rows(); ++r)
      for (Index c = 0; c < 6; ++c) {
        const Index i = r % 20;
        const TestType v = rows[std::size_t(r * 6 + c)];
        if (i >= 8 && i <= 10 && runner.name != "intent-calculated")
          CHECK_FALSE(std::isfinite(v));
        else if (i < 8 || i > 10)
          CHECK(std::isfinite(v));
      }
    CHECK(same_bits(tokens(result.out, 0, 8), tokens(clean.out, 0, 8)));
    CHECK(same_bits(tokens(result.out, 11, 20), tokens(clean.out, 11, 20)));
  });
}

TEMPLATE_TEST_CASE("finite logits of any size give finite outputs and gradients", "[semantics]",
                   float, double) {
  // Logits up to 1e30 by one large query row, and by a large scale.
  for (const double size : {1e4, 1e10, 1e30})
    for (const bool by_scale : {false, true})
      for_calls<TestType>(geometry(1, 2, 1, 20, 20, 4, 4), [&](const auto& runner, auto& call) {
        INFO("logits of " << size << (by_scale ? " by the scale" : " by the queries"));
        if (by_scale) {
          call.options.scale = size;
        } else {
          if (sizeof(TestType) == 4 && size > 1e18) return;  // |q|^2 of a float overflows
          for (Index i = 0; i < 20; i += 2)
            for (Index h = 0; h < call.query.shape().heads; ++h)
              for (Index c = 0; c < call.query.shape().dim; ++c)
                call.query(0, h, i, c) *= TestType(size);
        }
        for (const auto& mask : {OwnedMask<TestType>{}, owned(heed::causal<TestType>())}) {
          call.mask = mask;
          const auto result = forward(runner, call);
          const auto out = result.out.template dense<double>();
          CHECK(all_finite(out));
          CHECK(all_finite(std::vector<double>(result.saved.lse.begin(), result.saved.lse.end())));
          if (runner.weights_sum_to_1)
            CHECK(largest(out) <= largest(call.value.template dense<double>()) * 1.001);
          for (const auto& tensor : backward(runner, call, result)) {
            INFO("gradient of " << tensor.name);
            CHECK(all_finite(tensor.values));
          }
        }
      });
}

TEMPLATE_TEST_CASE("a constant added to a row of scores changes nothing", "[semantics]", float,
                   double) {
  for_calls<TestType>(geometry(1, 2, 1, 20, 20, 4, 4), [](const auto& runner, auto& call) {
    call.mask = random_bias<TestType>({1, 1, 20, 20}, 8);
    const auto before = forward(runner, call).out.template dense<double>();
    // 64 is exact on a grid of 1/1024.
    for (Index i = 0; i < 20; ++i)
      for (Index j = 0; j < 20; ++j) {
        TestType& x = (*call.mask.bias)(0, 0, i, j);
        x = TestType(std::round(double(x) * 1024) / 1024);
      }
    const auto base = forward(runner, call).out.template dense<double>();
    for (Index i = 0; i < 20; ++i)
      for (Index j = 0; j < 20; ++j) (*call.mask.bias)(0, 0, i, j) += TestType(64);
    const auto shifted = forward(runner, call).out.template dense<double>();
    Distance distance;
    // Scores of 64 round at 32 eps, twice.
    const double allowed = 256 * tolerance::eps<TestType> * std::max(1.0, largest(base));
    for (std::size_t n = 0; n < base.size(); ++n) distance.note(n, shifted[n], base[n], allowed);
    INFO(distance.text());
    CHECK(distance.within());
    CHECK(before.size() == base.size());
  });
}

TEMPLATE_TEST_CASE("a bias of -FLT_MAX is a number and -infinity hides", "[semantics]", float,
                   double) {
  const TestType lowest = std::numeric_limits<TestType>::lowest();
  for_calls<TestType>(geometry(1, 2, 1, 9, 9, 4, 4), [&](const auto& runner, auto& call) {
    // All keys at the lowest number: the softmax is uniform, not empty.
    OwnedMask<TestType> mask = random_bias<TestType>({1, 1, 9, 9}, 4);
    mask.bias->fill(lowest);
    call.mask = mask;
    const auto uniform = forward(runner, call);
    for (const TestType lse : uniform.saved.lse) CHECK(lse != -kInf<TestType>);
    const auto& rows = uniform.saved.mixed.empty() ? uniform.out.dense() : uniform.saved.mixed;
    if (runner.maps == 1 && (runner.plain_rows || !uniform.saved.mixed.empty()))
      for (Index h = 0; h < 2; ++h)
        for (Index c = 0; c < 4; ++c) {
          double mean = 0;
          for (Index j = 0; j < 9; ++j) mean += double(call.value(0, 0, j, c)) / 9;
          for (Index i = 0; i < 9; ++i)
            CHECK(double(rows[std::size_t((h * 9 + i) * 4 + c)]) == Approx(mean).margin(1e-5));
        }
    for (const auto& tensor : backward(runner, call, uniform)) CHECK(all_finite(tensor.values));
    // One key at the lowest number, among others at 0: weight 0, and the same as hidden.
    mask.bias->fill(TestType(0));
    for (Index i = 0; i < 9; ++i) (*mask.bias)(0, 0, i, 5) = lowest;
    const auto low = forward(runner, call);
    for (Index i = 0; i < 9; ++i) (*mask.bias)(0, 0, i, 5) = -kInf<TestType>;
    const auto hidden = forward(runner, call);
    const auto a = low.out.template dense<double>(), b = hidden.out.template dense<double>();
    for (std::size_t n = 0; n < a.size(); ++n) CHECK(a[n] == Approx(b[n]).margin(1e-6));
  });
}

TEST_CASE("masks hide and add what their definitions say, pair by pair", "[semantics]") {
  // Written out here as boolean masks and biases, independently of the classifier that both the engine and
  // its reference ask.
  struct Written {
    const char* name;
    heed::Mask<double> mask;
    std::function<bool(Index b, Index i, Index j)> visible;
    std::function<double(Index h, Index i, Index j)> bias;
  };
  const Index len_q = 21, len_kv = 30, shift = len_kv - len_q;
  const auto all = [](Index, Index, Index) { return true; };
  const auto none = [](Index, Index, Index) { return 0.0; };
  std::vector<Index> queries, keys;
  for (Index n = 0; n < 2 * len_q; ++n) queries.push_back(n % 4);
  for (Index n = 0; n < 2 * len_kv; ++n) keys.push_back(n % 7);
  const Written cases[] = {
      {"causal", heed::causal<double>(), [](Index, Index i, Index j) { return j <= i; }, none},
      {"causal, bottom right", heed::causal<double>(Align::bottom_right),
       [=](Index, Index i, Index j) { return j <= i + shift; }, none},
      {"causal, offset", heed::causal<double>(Align::top_left, 2),
       [](Index, Index i, Index j) { return j <= i + 2; }, none},
      {"window", heed::window<double>(3, 1),
       [](Index, Index i, Index j) { return i - 3 <= j && j <= i + 1; }, none},
      {"window, bottom right, offset", heed::window<double>(2, 0, Align::bottom_right, -1),
       [=](Index, Index i, Index j) { return i + shift - 3 <= j && j <= i + shift - 1; }, none},
      {"window, open to the right", heed::window<double>(1, -1),
       [](Index, Index i, Index j) { return i - 1 <= j; }, none},
      {"key lengths", heed::key_lengths<double>({17, 0}),
       [](Index b, Index, Index j) { return j < (b == 0 ? 17 : 0); }, none},
      {"documents", heed::documents<double>(queries, keys),
       [&](Index b, Index i, Index j) {
         return queries[std::size_t(b * len_q + i)] == keys[std::size_t(b * len_kv + j)];
       },
       none},
      {"alibi", heed::alibi<double>({0.5, 0.25}), all,
       [](Index h, Index i, Index j) { return (h == 0 ? -0.5 : -0.25) * std::abs(double(i - j)); }},
      {"alibi, bottom right", heed::alibi<double>({0.5, 0.25}, Align::bottom_right), all,
       [=](Index h, Index i, Index j) {
         return (h == 0 ? -0.5 : -0.25) * std::abs(double(i + shift - j));
       }},
  };
  for (const Written& written : cases)
    for_calls<double>(geometry(2, 2, 1, len_q, len_kv, 4, 4), [&](const auto& runner, auto& call) {
      INFO(written.name);
      call.mask = owned(written.mask);
      const auto analytic = forward(runner, call).out.dense();
      call.mask = boolean_mask<double>(
          {2, 1, len_q, len_kv},
          [&](Index b, Index, Index i, Index j) { return written.visible(b, i, j); });
      OwnedMask<double> bias = random_bias<double>({1, 2, len_q, len_kv}, 1);
      for (Index h = 0; h < 2; ++h)
        for (Index i = 0; i < len_q; ++i)
          for (Index j = 0; j < len_kv; ++j) (*bias.bias)(0, h, i, j) = written.bias(h, i, j);
      call.mask = call.mask & bias;
      const auto by_hand = forward(runner, call).out.dense();
      Distance distance;
      for (std::size_t n = 0; n < by_hand.size(); ++n)
        distance.note(n, analytic[n], by_hand[n], tolerance::exact_gradient(1));
      INFO(distance.text());
      CHECK(distance.within());
    });
}

TEMPLATE_TEST_CASE("no token of a causal call sees the future, not in one bit", "[semantics]",
                   float, double) {
  const Index len = 19, dim = 4, heads = 2;
  for (const Runner<TestType>& runner :
       runners<TestType, kNeeds>(geometry(2, heads, 1, len, len, dim, dim))) {
    INFO(runner.name);
    const Geometry& g = runner.geometry;
    // A token holds its rows of query, key, value and extra, of all heads: packed memory, read in place.
    const Index q = g.query_heads * g.dim_qk, k = g.kv_heads * g.dim_qk, v = g.kv_heads * g.dim_v;
    const Index width = q + k + v + g.heads * runner.extra_dim;
    std::vector<TestType> tokens_in(std::size_t(g.batch * len * width));
    const heed::CounterRandom random(kSeed, 77);
    for (std::size_t n = 0; n < tokens_in.size(); ++n) tokens_in[n] = TestType(random.normal(n));
    const auto run = [&](const std::vector<TestType>& x) {
      const auto part = [&](Index first, Index n, Index d) {
        return heed::TensorView<const TestType>(x.data() + first, {g.batch, n, len, d},
                                                {len * width, d, width});
      };
      heed::Inputs<TestType> in{part(0, g.query_heads, g.dim_qk),
                                part(q, g.kv_heads, g.dim_qk),
                                part(q + k, g.kv_heads, g.dim_v),
                                {}};
      if (runner.extra_dim > 0) in.extra = part(q + k + v, g.heads, runner.extra_dim);
      std::vector<TestType> out(std::size_t(g.query_rows() * g.dim_v));
      runner.forward(in, heed::causal<TestType>(),
                     heed::view_bthd(out.data(), g.batch, len, g.heads, g.dim_v), nullptr,
                     small_tiles());
      return out;
    };
    heed::CausalityOptions options;
    options.batch = g.batch;
    const auto report = heed::audit_causality(run, tokens_in, len, options);
    INFO(report.text());
    CHECK(report.causal);
    CHECK(report.effective >= report.runs * 3 / 4);
  }
}

TEMPLATE_TEST_CASE("keys may be permuted together with their values", "[semantics]", float,
                   double) {
  for_calls<TestType>(geometry(1, 2, 1, 20, 29, 4, 4), [](const auto& runner, auto& call) {
    if (runner.reads_own_rows) return;  // those of the queries' positions
    const auto base = forward(runner, call).out.template dense<double>();
    Call<TestType> moved = call;
    for (Index j = 0; j < 29; ++j)
      for (Index c = 0; c < 4; ++c) {
        const Index to = (j * 12 + 5) % 29;
        if (c < call.key.shape().dim) moved.key(0, 0, to, c) = call.key(0, 0, j, c);
        moved.value(0, 0, to, c) = call.value(0, 0, j, c);
      }
    const auto same = forward(runner, moved).out.template dense<double>();
    Distance distance;
    const double allowed = 64 * tolerance::eps<TestType> * std::max(1.0, largest(base));
    for (std::size_t n = 0; n < base.size(); ++n) distance.note(n, same[n], base[n], allowed);
    INFO(distance.text());
    CHECK(distance.within());
  });
}

TEMPLATE_TEST_CASE("weights that sum to 1 carry values of 1 to outputs of 1", "[semantics]", float,
                   double) {
  int checked = 0;
  for (const MaskCase<TestType>& mask : mask_cases<TestType>())
    for_calls<TestType>(geometry(2, 2, 1, 20, 37, 4, 4), [&](const auto& runner, auto& call) {
      if (!runner.weights_sum_to_1) return;
      INFO("mask: " << mask.name);
      call.mask = mask.make(call.geometry);
      call.value.fill(TestType(1));
      const auto result = forward(runner, call);
      const auto out = result.out.template dense<double>();
      for (std::size_t n = 0; n < out.size(); ++n) {
        const double wanted = result.saved.lse[n / 4] == -kInf<TestType> ? 0.0 : 1.0;
        if (std::abs(out[n] - wanted) > tolerance::sum_of_weights<TestType>) {
          INFO("entry " << n << " is " << out[n]);
          CHECK(false);
        }
        ++checked;
      }
      // Then no score has a gradient.
      const Named gradients = backward(runner, call, result);
      for (const char* name : {"query", "key"})
        CHECK(largest(gradient(gradients, name)) <= 1024 * tolerance::eps<TestType>);
    });
  CHECK(checked > 0);
}

TEMPLATE_TEST_CASE("gradients are overwritten, and views that are not given are skipped",
                   "[semantics]", float, double) {
  for_calls<TestType>(geometry(2, 4, 2, 20, 20, 4, 4), [](const auto& runner, auto& call) {
    call.mask = random_bias<TestType>({1, 4, 1, 20}, 9) & owned(heed::causal<TestType>());
    const auto result = forward(runner, call);
    const Named all = backward(runner, call, result);
    check_same_gradients(backward(runner, call, result), all);
    for (int given = 0; given < 5; ++given) {
      const Tensor<TestType>* shapes[] = {&call.query, &call.key, &call.value, &call.extra,
                                          call.mask.bias.get()};
      const char* names[] = {"query", "key", "value", "extra", "bias"};
      if (!shapes[given]->given()) continue;
      INFO("only " << names[given] << " is asked for");
      Tensor<TestType> grad(shapes[given]->shape());
      grad.fill(TestType(-3));
      heed::Gradients<TestType> grads;
      (given == 0   ? grads.query
       : given == 1 ? grads.key
       : given == 2 ? grads.value
       : given == 3 ? grads.extra
                    : grads.bias) = grad.view();
      const Named params =
          runner.backward(call.inputs(), call.mask.mask, result.saved, result.out.view(),
                          call.grad_out.view(), grads, call.options);
      // The bias decides which heads take turns, hence the order of sums: equal but for rounding.
      const std::vector<double> got = grad.template dense<double>(),
                                &wanted = gradient(all, names[given]);
      Distance distance;
      const double allowed = 64 * tolerance::eps<TestType> * std::max(1.0, largest(wanted));
      for (std::size_t n = 0; n < got.size(); ++n) distance.note(n, got[n], wanted[n], allowed);
      INFO(distance.text());
      CHECK(distance.within());
      for (const auto& tensor : params)
        for (std::size_t n = 0; n < tensor.values.size(); ++n)
          CHECK(tensor.values[n] ==
                Approx(gradient(all, tensor.name)[n]).epsilon(1e-4).margin(1e-4));
    }
  });
}

TEMPLATE_TEST_CASE("empty batches, heads and lengths have the right shape and no work",
                   "[semantics]", float, double) {
  const Geometry empties[] = {geometry(0, 2, 1, 5, 5, 4, 4), geometry(2, 2, 1, 0, 0, 4, 4),
                              geometry(2, 2, 1, 0, 5, 4, 4), geometry(2, 2, 1, 5, 0, 4, 4)};
  for (const Geometry& g : empties)
    for_calls<TestType>(g, [](const auto& runner, auto& call) {
      const auto result = forward(runner, call);
      CHECK(result.out.size() == runner.geometry.query_rows() * runner.geometry.dim_v);
      CHECK(Index(result.saved.lse.size()) == runner.maps * runner.geometry.query_rows());
      const Named grads = backward(runner, call, result);
      for (const auto& tensor : grads) {
        INFO("gradient of " << tensor.name);
        CHECK(all_finite(tensor.values));
        if (runner.plain_rows) CHECK(all_zero(tensor.values));
      }
      if (runner.plain_rows) CHECK(all_positive_zero(result.out.dense()));
    });
}

TEMPLATE_TEST_CASE("query, key and value may be one tensor", "[semantics]", float, double) {
  for_calls<TestType>(geometry(2, 2, 2, 17, 17, 4, 4), [](const auto& runner, auto& call) {
    if (call.query.shape() != call.key.shape()) return;
    Call<TestType> copies = call;
    copies.key = copies.value = copies.query;
    const auto apart = forward(runner, copies);
    Tensor<TestType> out(call.grad_out.shape());
    const auto x = std::as_const(copies.query).view();
    runner.forward({x, x, x, std::as_const(call.extra).view()}, {}, out.view(), nullptr,
                   call.options);
    CHECK(same_bits(out.dense(), apart.out.dense()));
  });
}
