// SPDX-License-Identifier: Apache-2.0
// Numbers of tokens that normalisers and readouts read: against plain loops, the reference and forward mode.

#include "catch.hpp"
#include "direction.hpp"
#include "forgetting_score.hpp"
#include "message_of.hpp"
#include "own_op.hpp"
#include "token_parts.hpp"

#include <heed/check/op_check.hpp>
#include <heed/kv_cache.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::Forgetting, heed_test::message_of, heed_test::GatedSink, heed_test::Gate,
    heed_test::StreamedSink;

struct Temperatures : TokenInputs<1, 1> {
  static constexpr const char* query_inputs_name = "temperature";
};
template <class Real>
struct Tempered {
  using Features = Temperatures;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0] + pair.key[0];
  }
};

template <class Real>
using Weighed = Attention<Real, DotScore<Real>, GatedSink<Real>, Identity<Real>>;
template <class Real>
using Gated = Attention<Real, DotScore<Real>, Softmax<Real>, Gate<Real>>;
template <class Real>
using Streams = Attention<Real, DotScore<Real>, StreamedSink<Real>, Identity<Real>>;
// w_j = x_i y_j s_j of a number x of the query and y of the key, both passes and forward mode by hand.
template <class Real>
struct ByHand : PlainRows {
  using P = Pack<Real>;
  static constexpr int query_inputs = 1, key_inputs = 1;
  void forward(const RowBlock<Real>& block) const {
    for_pairs(block, [&](Index j, int v, P s, P x, P y) {
      block.scores[0].store(j, v, zero_where(is_hidden(s), x * y * s));
    });
  }
  // ds = G x y, dx = sum_j G y s, dy = sum_i G x s
  void vjp(const RowBlock<Real>& block, ByHand&) const {
    for_pairs(block, [&](Index j, int v, P s, P x, P y) {
      const P pull = block.dweights.load(j, v);
      const auto hidden = is_hidden(s);
      block.weights.store(j, v, zero_where(hidden, x * y * s));
      block.dscores[0].store(j, v, zero_where(hidden, pull * x * y));
      block.dquery_inputs.add(0, v, zero_where(hidden, pull * y * s));
      block.dkey_inputs(j, 0) +=
          sum_valid_lanes(zero_where(hidden, pull * x * s), v, block.valid_lanes);
    });
  }
  // w. = x. y s + x y. s + x y s.
  void jvp(const RowBlock<Real>& block, const RowTangents<Real>& tangents, const ByHand&) const {
    for_pairs(block, [&](Index j, int v, P s, P x, P y) {
      const P moved_x = tangents.query_inputs.load(0, v), moved_y = tangents.key_inputs(j, 0);
      const P moved = moved_x * y * s + x * moved_y * s + x * y * tangents.scores[0].load(j, v);
      block.scores[0].store(j, v, zero_where(is_hidden(s), x * y * s));
      tangents.scores[0].store(j, v, zero_where(is_hidden(s), moved));
    });
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (std::size_t n = 0; n < row.keys.size(); ++n)
      weights.push_back(row.query_inputs[0] * row.key_inputs[n][0] * row.scores[0][n]);
    return weights;
  }

 private:
  // Calls body(j, v, s, x, y) for each vector of pairs.
  template <class Body>
  static void for_pairs(const RowBlock<Real>& block, Body&& body) {
    for (int v = 0; v < block.vectors; ++v)
      for (Index j = 0; j < block.keys(); ++j)
        body(j, v, block.scores[0].load(j, v), block.query_inputs.load(0, v),
             P(block.key_inputs(j, 0)));
  }
};
template <class Real>
using HandWritten = Attention<Real, OwnScore<Tempered, Real>, ByHand<Real>, Gate<Real>>;

// A number of the key times a score above 0. No comparison with a NaN holds: this one hides it.
template <class Real>
struct Chosen : PlainRows {
  static constexpr int key_inputs = 1;
  auto forward(const auto& row) const {
    const auto s = row.score();
    return math::select(s > 0.0, row.key_input(0) * s, 0.0);
  }
};

template <class Real>
using All = Attention<Real, OwnScore<Tempered, Real>, GatedSink<Real>, Gate<Real>>;
template <class Real>
using Sums = Attention<Real, OwnScore<Forgetting, Real>, GatedSink<Real>, Gate<Real>>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class Op>
void check(const Op& op) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 35, 67, 3, 5}}) {
    const OpReport report = check_op(op, g, {.max_entries_per_tensor = 12});
    INFO(report.text());
    CHECK(report.passed());
  }
}

static_assert(InputColumns<All<float>>::query == 4 && InputColumns<All<float>>::key == 3);
static_assert(InputColumns<All<float>>::normaliser_query.first == 1 &&
              InputColumns<All<float>>::readout_query.first == 2 &&
              InputColumns<All<float>>::normaliser_key.first == 1);

}  // namespace

TEST_CASE("Normalisers and readouts that read numbers of tokens agree with the twin",
          "[part_inputs]") {
  SECTION("a formula of rows") { check(Weighed<double>{}); }
  SECTION("rows by hand") { check(HandWritten<double>{}); }
  SECTION("a readout") { check(Gated<double>{}); }
  SECTION("a normaliser that streams") { check(Streams<double>{}); }
  SECTION("all parts") { check(All<double>{}); }
  SECTION("beside sums") { check(Sums<double>{}); }
}

TEST_CASE("Numbers of the parts stand side by side, those of the score in front", "[part_inputs]") {
  const Geometry g{2, 4, 4, 2, 7, 9, 5, 3};
  for (const Index shared : {1, 2, 4}) {  // heads of both tensors
    auto numbers = normal_numbers(All<double>{}, g);
    numbers.query_inputs.resize(std::size_t(2 * shared * 7 * 4));
    numbers.key_inputs.resize(std::size_t(2 * shared * 9 * 3));
    OpCall<All<double>> call({}, g, causal<double>(Align::bottom_right), {}, numbers);
    call.forward();
    double largest = 0;
    for (Index b = 0; b < 2; ++b)
      for (Index h = 0; h < 4; ++h)
        for (Index i = 0; i < 7; ++i) {
          const Index head = b * shared + h * shared / 4;
          const double* q = numbers.query_inputs.data() + (head * 7 + i) * 4;
          std::vector<double> weights;
          double sum = std::exp(q[1]);
          for (Index j = 0; j <= i + 2; ++j) {
            const double* k = numbers.key_inputs.data() + (head * 9 + j) * 3;
            double dot = 0;
            for (Index c = 0; c < 5; ++c)
              dot += numbers.query[std::size_t(((b * 4 + h) * 7 + i) * 5 + c)] *
                     numbers.key[std::size_t(((b * 2 + h / 2) * 9 + j) * 5 + c)];
            const double score = dot / std::sqrt(5.0) * q[0] + k[0] + 0.1 * k[2] * q[1];
            weights.push_back(std::exp(score) / (1 + std::exp(-k[1])));
            sum += weights.back();
          }
          for (Index c = 0; c < 3; ++c) {
            double out = 0;
            for (std::size_t j = 0; j < weights.size(); ++j)
              out += weights[j] / sum *
                     numbers.value[std::size_t(((b * 2 + h / 2) * 9 + Index(j)) * 3 + c)];
            out = out / (1 + std::exp(-q[3])) + (c == 0 ? q[2] : 0);
            largest = std::max(
                largest, std::abs(out - call.out[std::size_t(((b * 4 + h) * 7 + i) * 3 + c)]));
          }
        }
    CHECK(largest < 1e-13);
  }
}

TEST_CASE("Gradients of numbers of parts have the same bits for any number of threads",
          "[part_inputs]") {
  const auto check_bits = [](auto op) {
    OpCall call(op, {2, 4, 4, 2, 131, 203, 9, 5}, causal<float>(Align::bottom_right),
                {.key_tile = 1});
    heed_test::check_bits_on_threads(call);
  };
  check_bits(All<float>{});
  check_bits(Streams<float>{});
}

TEST_CASE("Tokens that are decoded from a cache read the numbers of normalisers and readouts",
          "[part_inputs]") {
  // The last tokens of a whole call, with a cache of its keys and values: they bring the numbers of their own queries and
  // of all keys. Both few enough tokens for the path of few queries, and more.
  const auto check_decoding = [](auto op, Index len, Index count) {
    OpCall call(op, {1, 4, 4, 2, len, len, 8, 8}, causal<double>());
    call.forward();
    KvCache<double> cache(1, 2, 8, 8);
    cache.append(call.inputs().key, call.inputs().value);
    const auto last = [&](const std::vector<double>& numbers, const Shape& whole) {
      return TensorView<const double>(numbers.data() + (len - count) * whole.dim,
                                      {1, whole.heads, count, whole.dim}, dense_strides(whole));
    };
    const Inputs<double> all = call.inputs();
    Inputs<double> in = cache.inputs(last(call.query, all.query.shape()));
    if (all.query_inputs.given())
      in.query_inputs = last(call.query_inputs, all.query_inputs.shape());
    in.key_inputs = all.key_inputs;
    const Shape shape{1, 4, count, 8};
    std::vector<double> out(std::size_t(4 * count * 8), kNan);
    forward(op, in, causal<double>(Align::bottom_right), TensorView<double>(out.data(), shape));
    double largest = 0;
    for (Index h = 0; h < 4; ++h)
      for (Index n = 0; n < count * 8; ++n) {
        const double whole = call.out[std::size_t((h * len + len - count) * 8 + n)];
        largest = std::max(largest, std::abs(out[std::size_t(h * count * 8 + n)] - whole));
      }
    INFO(len << " tokens, the last " << count);
    CHECK(largest < 1e-12);
  };
  for (const Index count : {1, 3, 20}) {
    check_decoding(Weighed<double>{}, 45, count);
    check_decoding(Gated<double>{}, 45, count);
    check_decoding(Streams<double>{}, 45, count);
    check_decoding(All<double>{}, 45, count);
    check_decoding(Sums<double>{}, 45, count);
  }
  // Enough keys for several parts, which are visited side by side.
  check_decoding(Gated<double>{}, 5000, 1);
  check_decoding(Streams<double>{}, 5000, 1);
}

TEST_CASE("Numbers of keys that a formula's rows do not see leave no trace", "[part_inputs]") {
  std::vector<Index> of_keys(61, 0);
  std::vector<bool> hidden(61, false);
  for (std::size_t j = 3; j < 61; j += 7) {  // a document without queries
    of_keys[j] = 1;
    hidden[j] = true;
  }
  heed_test::check_hidden_inputs(
      OpCall<Weighed<double>>({}, {1, 2, 2, 1, 50, 61, 4, 4},
                              documents<double>(std::vector<Index>(50, 0), of_keys)),
      hidden);
}

TEST_CASE("A row that is NaN makes the gradients of the numbers that it sees NaN",
          "[part_inputs]") {
  using Op = Attention<double, DotScore<double>, Chosen<double>, Identity<double>>;
  const Index len = 20, dim = 4, spoilt = 12;
  OpCall<Op> call({}, {1, 2, 2, 2, len, len, dim, dim}, causal<double>());
  call.query[std::size_t((len + spoilt) * dim)] = kNan;  // of the second head
  call.forward();
  call.backward();
  for (Index h = 0; h < 2; ++h)
    for (Index t = 0; t < len; ++t) {
      const auto at = std::size_t(h * len + t);
      INFO("head " << h << ", token " << t);
      CHECK(std::isnan(call.out[at * std::size_t(dim)]) == (h == 1 && t == spoilt));
      CHECK(std::isnan(call.grad_key_inputs[at]) == (h == 1 && t <= spoilt));
    }
}

TEST_CASE("Forward mode is the transpose of backward in numbers of parts", "[part_inputs]") {
  const auto check_transpose = [](auto op) {
    OpCall call(op, {2, 4, 4, 2, 21, 35, 6, 5}, causal<double>(Align::bottom_right));
    const heed_test::Direction direction(call, 7);
    for (const bool saved : {true, false}) {
      const auto moved = heed_test::run_jvp(call, direction, saved);
      CHECK(heed_test::transpose_gap(call, direction, moved) < 1e-13);
    }
  };
  check_transpose(All<double>{});
  check_transpose(HandWritten<double>{});
  check_transpose(Sums<double>{});
  check_transpose(Streams<double>{});
}

TEST_CASE("Numbers that parts miss are refused by all their names", "[part_inputs]") {
  OpCall<All<double>> call({}, {2, 4, 4, 2, 7, 9, 4, 4});
  Inputs<double> in = call.inputs();
  in.query_inputs = {};
  CHECK(message_of([&] { forward(call.op, in, {}, call.out_view()); }) ==
        "heed::forward: the op needs the input temperature, sink, gate of shape (2,4,7,4), or of 1 "
        "head, as query_inputs; none was given");
}
