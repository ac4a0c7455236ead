// SPDX-License-Identifier: Apache-2.0
// Numbers of tokens that scores read, and their sums over tokens: against plain loops and the reference.

#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/check/op_check.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/explain.hpp>
#include <heed/kv_cache.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

// Two numbers of each query, one of each key.
struct Temperatures : TokenInputs<2, 1> {
  static constexpr const char *query_inputs_name = "temperature", *key_inputs_name = "boost";
};
template <class Real>
struct Tempered {
  using Features = Temperatures;
  Param<Real> strength = Real(0.3);
  static constexpr auto parameters = std::tuple{named("strength", &Tempered::strength)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * pair.query[0] + pair.query[1] * pair.key[0] + p[0] * pair.key[0];
  }
};

// Scores that read more numbers of a token than they declare: as pair.key[1], in features, in their
// derivative, without declaring any, and in features of a handwritten score.
template <class Real>
struct SecondBoost {
  using Features = TokenInputs<0, 1>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.key[1];
  }
};
struct FarColumn : TokenInputs<0, 2> {
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = row.input(1);
    f[1] = row.input(2);
  }
};
template <class Real>
struct FarColumns {
  using Features = FarColumn;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.key[0];
  }
};
struct FarGradient : TokenInputs<1, 0> {
  template <class Row, class S, class Add>
  void query_features_vjp(const Row&, const S*, const S* df, const Add& add) const {
    add.add_input(-1, df[0]);
  }
};
template <class Real>
struct FarGradients {
  using Features = FarGradient;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.query[0];
  }
};
struct UndeclaredInput : NothingDerived {
  static constexpr int key_features = 1;
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = row.input(0);
  }
};
template <class Real>
struct Undeclared {
  using Features = UndeclaredInput;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.key[0];
  }
};
template <class Real>
struct ByHand : ScoreWith<TokenInputs<1, 0>> {
  template <class S>
  S score(const PairOf<ByHand, S>& pair, const auto&) const {
    return pair.logit + pair.query[0];
  }
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = row.input(3);
  }
};

// logit + F_i - F_j, F the sums of log sigmoid of key_inputs.
template <class Real>
struct Forgetting {
  using Features = CumulativeInputs<1, LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.query[0] - pair.key[0];
  }
};

// Own features: the square of a number of the key.
struct Squares : TokenInputs<0, 1> {
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = row.input(0) * row.input(0);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row& row, const S*, const S* df, const Add& add) const {
    add.add_input(0, (df[0] + df[0]) * row.input(0));
  }
};
template <class Real>
struct Squared {
  using Features = Squares;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit - pair.key[0];
  }
};

// A score that reads two sums, of which those of queries do not cancel in a softmax.
template <class Real>
struct Damped {
  using Features = CumulativeInputs<2>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * math::sigmoid(S(pair.query[0] - pair.key[0])) +
           pair.query[1] * pair.key[1] * math::constant<S>(0.1);
  }
};

// A score that promises to depend on no head and position.
template <class Real>
struct Boosted {
  using Features = TokenInputs<0, 1>;
  using PlaceFree = Boosted;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.key[0];
  }
};

// The sum of a key's tokens alone.
template <class Real>
struct Summed {
  using Features = CumulativeInputs<>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.key[0];
  }
};

template <template <class> class Score, class Real>
using Own = OwnAttention<Score, Real>;
template <class Real>
using Twice =
    Attention<Real, OwnScore<Tempered, Real>, Difference<Real, GivenLambda<Real>>, Identity<Real>>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class Op>
void check(const Op& op) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 35, 67, 3, 5, 32}}) {
    const OpReport report = check_op(op, g, {.max_entries_per_tensor = 12});
    INFO(report.text());
    CHECK(report.passed());
    CHECK(report.cases.size() >= 10);
    CHECK(report.text().find("FAILED") == std::string::npos);
  }
}

}  // namespace

TEST_CASE("Scores that read numbers of tokens agree with the twin", "[token_inputs]") {
  SECTION("of queries and keys") { check(Own<Tempered, double>{}); }
  SECTION("by features of one's own") { check(Own<Squared, double>{}); }
  SECTION("sums of keys") { check(Own<Forgetting, double>{}); }
  SECTION("two sums each") { check(Own<Damped, double>{}); }
  SECTION("in both maps of a difference") {
    const OpReport report = check_op(Twice<double>{}, {2, 4, 4, 2, 11, 11, 6, 6});
    INFO(report.text());
    CHECK(report.passed());
  }
}

TEST_CASE("Forgetting attention is what plain loops say", "[token_inputs]") {
  const Geometry g{2, 4, 4, 2, 13, 13, 5, 3};
  for (const Index gates :
       {1, 2, 4}) {  // shared by all heads, by those of a key-value head, by none
    auto numbers = normal_numbers(Own<Forgetting, double>{}, g);
    numbers.key_inputs.resize(std::size_t(2 * gates * 13));
    OpCall<Own<Forgetting, double>> call({}, g, causal<double>(), {}, numbers);
    call.forward();
    double largest = 0;
    for (Index b = 0; b < 2; ++b)
      for (Index h = 0; h < 4; ++h)
        for (Index i = 0; i < 13; ++i) {
          std::vector<double> weights;
          double sum = 0;
          for (Index j = 0; j <= i; ++j) {
            double logit = 0;
            for (Index c = 0; c < 5; ++c)
              logit += numbers.query[std::size_t(((b * 4 + h) * 13 + i) * 5 + c)] *
                       numbers.key[std::size_t(((b * 2 + h / 2) * 13 + j) * 5 + c)];
            double kept = 1;  // the product of the gates behind key j
            for (Index t = j + 1; t <= i; ++t)
              kept /=
                  1 +
                  std::exp(-numbers.key_inputs[std::size_t((b * gates + h * gates / 4) * 13 + t)]);
            weights.push_back(kept * std::exp(logit / std::sqrt(5.0)));
            sum += weights.back();
          }
          for (Index c = 0; c < 3; ++c) {
            double out = 0;
            for (Index j = 0; j <= i; ++j)
              out += weights[std::size_t(j)] / sum *
                     numbers.value[std::size_t(((b * 2 + h / 2) * 13 + j) * 3 + c)];
            largest = std::max(
                largest, std::abs(out - call.out[std::size_t(((b * 4 + h) * 13 + i) * 3 + c)]));
          }
        }
    CHECK(largest < 1e-13);
  }
}

TEST_CASE("Gradients of numbers of tokens have the same bits for any number of threads",
          "[token_inputs]") {
  const auto check_bits = [](auto op, Index heads) {
    const Geometry g{2, 4, 4, 2, 131, 203, 9, 5, 72};
    auto numbers = normal_numbers(op, g);
    numbers.query_inputs.resize(numbers.query_inputs.size() / 4 * std::size_t(heads));
    numbers.key_inputs.resize(numbers.key_inputs.size() / 4 * std::size_t(heads));
    OpCall call(op, g, causal<double>(Align::bottom_right), {.key_tile = 1}, numbers);
    INFO(heads << " heads");
    for (const NamedTensor& result : heed_test::results_of(call))
      CHECK(
          std::any_of(result.values.begin(), result.values.end(), [](double x) { return x != 0; }));
    heed_test::check_bits_on_threads(call);
  };
  for (const Index heads : {1, 2, 4}) {
    check_bits(Own<Tempered, double>{}, heads);
    check_bits(Own<Forgetting, double>{}, heads);
  }
}

TEST_CASE("A decoded token reads the numbers of all tokens", "[token_inputs]") {
  // Enough keys for several parts, which may be visited side by side.
  const auto check_decoding = [](auto op, Index len) {
    const Geometry g{1, 4, 4, 2, len, len, 8, 8};
    OpCall call(op, g, causal<double>(), {.threads = 3});
    call.forward();
    KvCache<double> cache(1, 2, 8, 8);
    cache.append(call.inputs().key, call.inputs().value);
    std::vector<double> query, out(4 * 8);
    for (Index h = 0; h < 4; ++h)
      query.insert(query.end(), call.query.begin() + (h * len + len - 1) * 8,
                   call.query.begin() + (h + 1) * len * 8);
    Inputs<double> in = cache.inputs(TensorView<const double>(query.data(), {1, 4, 1, 8}));
    in.key_inputs = call.inputs().key_inputs;
    for (const int again : {1, 2}) {
      forward(op, in, causal<double>(Align::bottom_right),
              TensorView<double>(out.data(), {1, 4, 1, 8}));
      double largest = 0;
      for (Index h = 0; h < 4; ++h)
        for (Index c = 0; c < 8; ++c)
          largest = std::max(largest, std::abs(out[std::size_t(h * 8 + c)] -
                                               call.out[std::size_t((h * len + len - 1) * 8 + c)]));
      CHECK(largest < 1e-12);
      // The cache keeps no numbers of tokens.
      std::reverse(call.key_inputs.begin(), call.key_inputs.end());
      call.forward();
      INFO("call " << again);
    }
  };
  for (const Index len : {45, 5000}) {
    if (len == 45) check_decoding(Own<Forgetting, double>{}, len);
    check_decoding(Own<Boosted, double>{}, len);
  }
}

TEST_CASE("Answers of parts of the keys merge where scores read sums", "[token_inputs]") {
  OpCall<Own<Forgetting, double>> call({}, {1, 2, 2, 2, 40, 90, 8, 8, 50},
                                       causal<double>(Align::bottom_right));
  call.forward();
  const auto part = [&](Index first, Index end) {
    return forward_partial(call.op, call.inputs(), call.mask & key_range<double>(first, end));
  };
  const Partial<double> whole = merge(part(0, 37), merge(part(37, 61), part(61, 90)));
  for (std::size_t n = 0; n < call.out.size(); ++n)
    CHECK(std::abs(whole.out[n] - call.out[n]) < 1e-12);
}

TEST_CASE("Numbers of hidden keys leave no trace", "[token_inputs]") {
  const Geometry g{1, 2, 2, 1, 50, 61, 4, 4};
  std::vector<Index> of_keys(61, 0);
  std::vector<bool> hidden(61, false);
  for (std::size_t j = 3; j < 61; j += 7) {  // a document without queries
    of_keys[j] = 1;
    hidden[j] = true;
  }
  const auto mask = documents<double>(std::vector<Index>(50, 0), of_keys);
  const auto check_trace = [&](auto call) {
    heed_test::check_hidden_inputs(call, hidden);
    call.forward();
    call.backward();
    const auto& of_inputs = call.grad_key_inputs;
    CHECK(std::count(of_inputs.begin(), of_inputs.end(), 0.0) == 2 * 9);
  };
  check_trace(OpCall<Own<Tempered, double>>({}, g, mask));
  check_trace(OpCall<Own<Squared, double>>({}, g, mask));

  // A NaN changes no sum before its token.
  OpCall<Own<Forgetting, double>> sums({}, {1, 2, 2, 1, 30, 61, 4, 4, 31},
                                       key_lengths<double>({25}));
  sums.mask = sums.mask & window<double>(40, 0);
  sums.forward();
  const std::vector<double> plain = sums.out;
  for (const Index h : {0, 1}) sums.key_inputs[std::size_t(h * 61 + 60)] = kNan;
  sums.options.key_tile = 1;
  sums.forward();
  sums.backward();
  // The last query's own token holds the NaN.
  for (std::size_t n = 0; n < 29 * 4; ++n) CHECK(std::abs(sums.out[n] - plain[n]) < 1e-12);
  CHECK(std::isnan(sums.out[29 * 4]));
}

TEST_CASE("Forward mode is the transpose of backward in numbers of tokens", "[token_inputs]") {
  // <u, J x.> = <J^T u, x.>, x. a direction in the numbers of tokens alone.
  const auto check_transpose = [](auto op, Index heads) {
    auto numbers = normal_numbers(op, {2, 4, 4, 2, 21, 35, 6, 5, 14});
    for (auto* inputs : {&numbers.query_inputs, &numbers.key_inputs})
      inputs->resize(inputs->size() / 4 * std::size_t(heads));
    OpCall call(op, {2, 4, 4, 2, 21, 35, 6, 5, 14}, causal<double>(Align::bottom_right), {},
                numbers);
    call.forward();
    call.backward();
    Inputs<double> in = call.inputs();
    Tangents<double> d;
    double back = 0;
    const auto move = [&](std::vector<double>& direction, const std::vector<double>& grad) {
      for (std::size_t n = 0; n < direction.size(); ++n) {
        direction[n] = std::sin(double(3 * n + 1));
        back += direction[n] * grad[n];
      }
    };
    auto of_query = numbers.query_inputs, of_key = numbers.key_inputs;
    move(of_query, call.grad_query_inputs);
    move(of_key, call.grad_key_inputs);
    if (in.query_inputs.given()) d.query_inputs = {of_query.data(), in.query_inputs.shape()};
    if (in.key_inputs.given()) d.key_inputs = {of_key.data(), in.key_inputs.shape()};
    std::vector<double> tangent(call.out.size());
    jvp(op, in, call.mask, call.saved, call.out_view(), d,
        TensorView<double>(tangent.data(), call.geometry().out_shape()));
    double along = 0;
    for (std::size_t n = 0; n < tangent.size(); ++n) along += tangent[n] * call.grad_out[n];
    CHECK(along == Approx(back).epsilon(1e-12));
    CHECK(std::abs(along) > 1e-3);
  };
  for (const Index heads : {1, 4}) {
    check_transpose(Own<Tempered, double>{}, heads);
    check_transpose(Own<Damped, double>{}, heads);
  }
  check_transpose(Own<Forgetting, double>{}, 2);
}

TEST_CASE("Sums of many tokens are added in double", "[token_inputs]") {
  const Index len = 20000;
  const Geometry g{1, 1, 1, 1, 1, len, 1, 1};
  OpCall<Own<Summed, float>> call({}, g, key_range<float>(len - 1, len));
  std::fill(call.key_inputs.begin(), call.key_inputs.end(), 0.1F);
  call.lse.assign(1, 0);
  call.grad_lse.assign(1, 0.3F);
  call.forward();
  call.backward();
  CHECK(call.lse[0] == float(double(0.1F) * double(len)));
  // Every token is in the sum of the one key that is seen, whose weight is 1 but for the rounding of exp().
  const float last = call.grad_key_inputs.back();
  CHECK(std::abs(last - 0.3F) <= 4 * std::numeric_limits<float>::epsilon() * 0.3F);
  CHECK(std::count(call.grad_key_inputs.begin(), call.grad_key_inputs.end(), last) == len);
}

TEST_CASE("Numbers of tokens may be stored in 16 bits", "[token_inputs]") {
  const Geometry g{1, 2, 2, 2, 21, 33, 4, 4};
  OpCall<Own<Summed, float>> call({}, g, causal<float>(Align::bottom_right));
  std::vector<bfloat16> stored, grad(call.key_inputs.size());
  for (float& x : call.key_inputs) {
    stored.push_back(bfloat16(x));
    x = float(stored.back());
  }
  call.forward();
  call.backward();
  const std::vector<float> out = call.out;
  Inputs<float> in = call.inputs();
  in.key_inputs = TensorView<const bfloat16>(stored.data(), {1, 2, 33, 1});
  Saved<float> saved;
  forward(call.op, in, call.mask, call.out_view(), &saved);
  CHECK(call.out == out);
  Gradients<float> grads;
  grads.key_inputs = TensorView<bfloat16>(grad.data(), {1, 2, 33, 1});
  backward(call.op, in, call.mask, saved, call.out_view(), call.grad_out_view(), grads);
  for (std::size_t n = 0; n < grad.size(); ++n)
    CHECK(float(grad[n]) == float(bfloat16(call.grad_key_inputs[n])));
}

TEST_CASE("Numbers of tokens that are missing or do not fit are refused", "[token_inputs]") {
  const Geometry g{2, 4, 4, 2, 7, 9, 4, 4};
  OpCall<Own<Tempered, double>> call({}, g);
  std::vector<double> memory(1000);
  const auto said = [&](auto&& change, const auto& op) {
    Inputs<double> in = call.inputs();
    change(in);
    return message_of([&] { forward(op, in, {}, call.out_view()); });
  };
  const auto view = [&](Shape shape) { return TensorView<const double>(memory.data(), shape); };
  CHECK(said([&](auto& in) { in.query_inputs = {}; }, call.op) ==
        "heed::forward: the op needs the input temperature of shape (2,4,7,2), or of 1 head, as "
        "query_inputs; none was given");
  CHECK(said(
            [&](auto& in) {
              in.key_inputs = view({2, 3, 9, 1});
            },
            call.op) ==
        "heed::forward: key_inputs (boost) has shape (2,3,9,1), it must be (2,4,9,1), or of "
        "1 or 2 heads");
  for (const Shape& wrong : {Shape{1, 4, 9, 1}, Shape{2, 4, 7, 1}, Shape{2, 4, 9, 2}})
    CHECK(said([&](auto& in) { in.key_inputs = view(wrong); }, call.op)
              .find("key_inputs (boost) has shape " + wrong.text()) != std::string::npos);
  CHECK(said([](auto&) {}, Own<Boosted, double>{}) ==
        "heed::forward: query_inputs of shape (2,4,7,2) was given, the op reads none");
  CHECK(said([](auto& in) { in.query_inputs = {}; }, ScaledDot<double>{}) ==
        "heed::forward: key_inputs of shape (2,4,9,1) was given, the op reads none");
  CHECK(said(
            [&](auto& in) {
              in.key_inputs = {call.out.data(), {2, 4, 9, 1}};
            },
            call.op) == "heed::forward: out overlaps key_inputs");

  call.forward();
  const auto said_back = [&](auto&& change) {
    std::vector<double> grad(1000);
    Gradients<double> grads;
    change(grads, grad.data());
    return message_of([&] {
      backward(call.op, call.inputs(), {}, call.saved, call.out_view(), call.grad_out_view(),
               grads);
    });
  };
  CHECK(said_back([](auto& grads, double* x) {
          grads.key_inputs = {x, {2, 1, 9, 1}};
        }) == "heed::backward: grad_key_inputs has shape (2,1,9,1), it must be (2,4,9,1)");
  CHECK(said_back([&](auto& grads, double*) {
          grads.query_inputs = {call.query_inputs.data(), {2, 4, 7, 2}};
        }) == "heed::backward: grad_query_inputs overlaps query_inputs");

  OpCall<Own<Forgetting, double>> sums({}, {1, 2, 2, 2, 5, 3, 4, 4});
  CHECK(message_of([&] { sums.forward(); }) ==
        "heed::forward: sums of key_inputs (key_inputs) are read at the queries' own tokens; "
        "first_query is 0, len_q is 5, len_kv is 3");
  OpCall<Own<Forgetting, double>> behind({}, {1, 2, 2, 2, 2, 3, 4, 4, 2});
  CHECK(message_of([&] { behind.forward(); }).find("first_query is 2, len_q is 2, len_kv is 3") !=
        std::string::npos);
}

TEST_CASE("Numbers of tokens that a score reads and does not declare are told in one sentence",
          "[token_inputs]") {
  const Geometry g{1, 2, 2, 2, 5, 5, 4, 4};
  const auto said = [&](const auto& op) {
    OpCall call(op, g);
    return message_of([&] { call.forward(); });
  };
  CHECK(said(Own<SecondBoost, float>{}) ==
        "heed::forward: the formula reads pair.key[1], its Features give each key row "
        "so many numbers: 1 (plug/own_score.hpp)");
  CHECK(said(Own<FarColumns, double>{}) ==
        "heed::forward: features of the score read row.input(2), the score's key_inputs gives each "
        "token so many numbers: 2 (plug/token_inputs.hpp)");
  CHECK(said(Own<FarGradients, float>{}) ==
        "heed::forward: features of the score add to add.add_input(-1), the score's query_inputs "
        "gives each token so many numbers: 1 (plug/token_inputs.hpp)");
  CHECK(said(Own<Undeclared, float>{}) ==
        "heed::forward: features of the score read row.input(0), the score's key_inputs gives each "
        "token so many numbers: 0 (plug/token_inputs.hpp)");
  CHECK(said(Attention<double, ByHand<double>, Softmax<double>, Identity<double>>{}) ==
        "heed::forward: features of the score read row.input(3), the score's query_inputs gives "
        "each token so many numbers: 1 (plug/token_inputs.hpp)");
}

TEST_CASE("Calls without tokens and plans of calls know numbers of tokens", "[token_inputs]") {
  for (const Geometry& g : {Geometry{0, 2, 2, 2, 5, 5, 4, 4}, Geometry{1, 2, 2, 2, 0, 5, 4, 4},
                            Geometry{1, 2, 2, 2, 0, 0, 4, 4}}) {
    OpCall<Own<Forgetting, double>> call({}, g);
    call.forward();
    call.backward();
    for (const double x : call.grad_key_inputs) CHECK(x == 0);
  }
  for (const Pass pass : {Pass::forward, Pass::backward})
    CHECK(explain(Own<Tempered, double>{}, {1, 2, 2, 2, 50, 50, 4, 4}, {}, pass).workers > 0);
}
