// SPDX-License-Identifier: Apache-2.0
// Packed sequences under every part of a mask, with own scores and normalisers, in other layouts
// and formats; and errors about lengths that do not fit.

#include "forgetting_score.hpp"
#include "learnt_features.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"
#include "packed_call.hpp"
#include "token_parts.hpp"
#include "turned_scores.hpp"

#include <heed/engine/jvp.hpp>
#include <heed/mask/block_lists.hpp>
#include <heed/mask/patterns.hpp>
#include <heed/mask/visible.hpp>
#include <heed/measure/weights.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/partial.hpp>

#include <memory>

using namespace heed;
using namespace heed_test;

namespace {

const Lengths kSelf{{5, 70, 0, 1, 37, 37, 19}, {5, 70, 0, 1, 37, 37, 19}};
const Lengths kCross{{5, 70, 4, 0, 1, 1, 17}, {9, 3, 0, 6, 130, 40, 33}};
const Geometry kGeometry{1, 4, 4, 2, 1, 1, 6, 6};

template <class T>
PackedMask<T> everywhere(const std::string& name, const Mask<T>& mask) {
  return {name, mask, [mask](Index) { return mask; }, {}};
}

// Memory of the tests' masks.
std::vector<std::vector<double>> numbers;
std::vector<std::unique_ptr<bool[]>> flags;

// Bias of a padded batch, a tenth of it hidden, and its corners.
PackedMask<double> bias_of(const Lengths& lengths, Index batch, Index heads, bool one_row) {
  const Shape shape{batch, heads,
                    one_row ? 1 : *std::max_element(lengths.queries.begin(), lengths.queries.end()),
                    *std::max_element(lengths.keys.begin(), lengths.keys.end())};
  const CounterRandom random(5, std::uint64_t(batch * 10 + heads));
  std::vector<double> all(std::size_t(element_count(shape, "bias")));
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = random.bits(i) % 10 == 0 ? -std::numeric_limits<double>::infinity() : random.normal(i);
  numbers.push_back(all);
  const TensorView<const double> whole(numbers.back().data(), shape);
  const auto corner = [=, view = whole, &lengths](Index n) {
    const Shape own{1, shape.heads, one_row ? 1 : lengths.queries[std::size_t(n)],
                    lengths.keys[std::size_t(n)]};
    std::vector<double> part;
    for (Index h = 0; h < own.heads; ++h)
      for (Index i = 0; i < own.len; ++i)
        for (Index j = 0; j < own.dim; ++j) part.push_back(view(batch == 1 ? 0 : n, h, i, j));
    numbers.push_back(part);
    return bias<double>(TensorView<const double>(numbers.back().data(), own));
  };
  return {"bias " + shape.text(), bias<double>(whole), corner, shape};
}

PackedMask<double> boolean_of(const Lengths& lengths) {
  const Shape shape{lengths.count(), 1,
                    *std::max_element(lengths.queries.begin(), lengths.queries.end()),
                    *std::max_element(lengths.keys.begin(), lengths.keys.end())};
  const auto count = std::size_t(element_count(shape, "mask"));
  const auto take = [](std::size_t size) {
    flags.push_back(std::make_unique<bool[]>(size + 1));
    return flags.back().get();
  };
  bool* all = take(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = CounterRandom(9).bits(i) % 3 != 0;
  const TensorView<const bool> whole(all, shape);
  const auto corner = [=, view = whole, &lengths](Index n) {
    const Shape own{1, 1, lengths.queries[std::size_t(n)], lengths.keys[std::size_t(n)]};
    bool* part = take(std::size_t(own.len * own.dim));
    for (Index i = 0; i < own.len; ++i)
      for (Index j = 0; j < own.dim; ++j) part[i * own.dim + j] = view(n, 0, i, j);
    return boolean<double>(TensorView<const bool>(part, own));
  };
  return {"boolean", boolean<double>(whole), corner, {}};
}

PackedMask<double> documents_of(const Lengths& lengths) {
  const auto ids = [](Index first, Index count) {
    std::vector<Index> of;
    for (Index i = 0; i < count; ++i) of.push_back((first + i) / 7);
    return of;
  };
  const std::vector<Index> q = Lengths::sums(lengths.queries), k = Lengths::sums(lengths.keys);
  const auto own = [=, &lengths](Index n) {
    const auto i = std::size_t(n);
    return documents<double>(ids(q[i], lengths.queries[i]), ids(k[i], lengths.keys[i]));
  };
  return {"documents", documents<double>(ids(0, q.back()), ids(0, k.back())), own, {}};
}

// A list of keys for each query of the padded batch, or the rows and keys that a sequence of it has.
PackedMask<double> lists_of(const Lengths& lengths) {
  const auto longest = [](const std::vector<Index>& of) {
    return *std::max_element(of.begin(), of.end());
  };
  const auto lists = [](Index first, Index count, Index rows, Index keys) {
    BlockLists made{1, 2, {0}, {}, count, 1};
    for (Index n = first; n < first + count; ++n)
      for (Index i = 0; i < rows; ++i) {
        for (Index k = 0; 2 * k < keys; ++k)
          if ((3 * n + i + k) % 4 < 2) made.indices.push_back(k);
        made.start.push_back(Index(made.indices.size()));
      }
    return block_lists<double>(made);
  };
  return {"lists",
          lists(0, lengths.count(), longest(lengths.queries), longest(lengths.keys)),
          [lists, &lengths](Index n) {
            return lists(n, 1, lengths.queries[std::size_t(n)], lengths.keys[std::size_t(n)]);
          },
          {}};
}

std::vector<PackedMask<double>> masks_of(const Lengths& lengths) {
  std::vector<PackedMask<double>> masks{
      everywhere("all", Mask<double>{}),
      everywhere("window, slopes, cap",
                 window<double>(9, 2, Align::bottom_right) &
                     alibi<double>({0.5, 0.1, 0.3, 0.2}, Align::bottom_right, -2) &
                     soft_cap<double>(3)),
      documents_of(lengths),
      boolean_of(lengths),
      lists_of(lengths),
      bias_of(lengths, 1, 1, false),
      bias_of(lengths, lengths.count(), 4, false),
      bias_of(lengths, 1, 4, true)};
  std::vector<Index> seen;
  for (const Index length : lengths.keys) seen.push_back((length + 1) / 2);
  masks.push_back({"key lengths",
                   key_lengths<double>(seen),
                   [seen](Index n) { return key_lengths<double>({seen[std::size_t(n)]}); },
                   {}});
  // A function gets the sequence as its batch.
  const auto by_batch = [](Index shift) {
    return visible<double>(
        [shift](auto b, auto h, auto i, auto j) { return (j + b + shift + h) % 3 != (i % 2); });
  };
  masks.push_back({"function of the batch", by_batch(0), by_batch, {}});
  std::vector<Index> prefix;
  for (Index n = 0; n < lengths.count(); ++n) prefix.push_back(2 * n);
  masks.push_back({"prefixes",
                   prefix_lm<double>(prefix),
                   [](Index n) { return prefix_lm<double>({2 * n}); },
                   {}});
  return masks;
}

template <class Op>
void check_all_threads(const char* name, const Op& op, const Geometry& g) {
  for (const int threads : {1, 4}) {
    check_packed(name, op, g, kSelf, everywhere("causal", causal<double>()), {.threads = threads});
    check_packed(name, op, g, kSelf, everywhere("all", Mask<double>{}), {.threads = threads});
  }
}

}  // namespace

TEST_CASE("packed sequences read their own part of every mask", "[packed]") {
  for (const Lengths* lengths : {&kSelf, &kCross})
    for (const PackedMask<double>& mask : masks_of(*lengths))
      for (const int threads : {1, 4}) {
        check_packed("sdpa", ScaledDot<double>{}, kGeometry, *lengths, mask, {.threads = threads});
        check_packed("differential", Differential<double>{}, kGeometry, *lengths, mask,
                     {.threads = threads, .key_tile = 1, .panel_vectors = 1});
      }
}

TEST_CASE("packed sequences of scores and normalisers of one's own", "[packed]") {
  using Learned = OwnAttention<Shaw, double>;
  using BentOp = OwnAttention<Bent, double>;
  using Turning = OwnAttention<NormedTurned, double>;
  using Sums = Attention<double, OwnScore<Forgetting, double>, GatedSink<double>, Gate<double>>;
  check_all_threads("relative rows", filled<Learned>(kGeometry, true), kGeometry);
  check_all_threads("bent keys", filled<BentOp>(kGeometry, true), kGeometry);
  check_all_threads("turned", filled<Turning>(kGeometry, false), kGeometry);
  check_all_threads("sums of tokens", Sums{}, kGeometry);
}

TEST_CASE("gradients of packed sequences have the same bits for any number of threads",
          "[packed]") {
  using Op = OwnAttention<Shaw, double>;
  const Op op = filled<Op>(kGeometry, true);
  const Lengths lengths{{5, 33, 0, 1, 9, 9, 60, 17, 2, 40}, {5, 33, 0, 1, 9, 9, 60, 17, 2, 40}};
  const Packed<double> packed = lengths.packed<double>();
  Geometry g = kGeometry;
  g.len_q = g.len_kv = packed.queries.back();
  // One bias for all sequences and heads, which all of them add to.
  const PackedMask<double> mask = bias_of(lengths, 1, 1, false);
  std::vector<double> wanted;
  for (int n = 0; n < 24; ++n) {
    OpCall<Op> call(op, g, mask.all, {.threads = n % 8 + 1, .key_tile = 1, .panel_vectors = 1});
    PackedInputs<double> in = call.inputs();
    in.packed = &packed;
    forward(op, in, call.mask, call.out_view(), &call.saved, call.options);
    std::vector<double> dk(call.key.size()), db(std::size_t(element_count(mask.bias, "bias")));
    Gradients<double> grads;
    grads.key = {dk.data(), g.key_shape()};
    grads.bias = {db.data(), mask.bias};
    Op grad_op = op;
    backward(op, in, call.mask, call.saved,
             StoredView<const double>(call.out.data(), g.out_shape()), call.grad_out_view(), grads,
             &grad_op, call.options);
    std::vector<double> all = call.out;
    all.insert(all.end(), dk.begin(), dk.end());
    all.insert(all.end(), db.begin(), db.end());
    for_each_param(grad_op, [&](const char*, const auto& param) {
      all.insert(all.end(), param.data(), param.data() + param.size());
    });
    if (n == 0) wanted = all;
    INFO("threads " << call.options.threads);
    CHECK(same_bits(all, wanted));
  }
}

TEST_CASE("packed sequences end when their own rows have halted", "[packed]") {
  for (const Halting halting : {Halting::batch, Halting::adaptive})
    check_all_threads(halting == Halting::batch ? "batch" : "adaptive",
                      moving_dialectical<double>(
                          kGeometry, {.max_steps = 5, .halt_eps = 0.3, .halting = halting}),
                      kGeometry);
  // Neighbours of one length, which end after different numbers of steps.
  const Lengths few{{1, 1, 1, 1, 1, 1, 2, 2, 2}, {1, 1, 1, 1, 1, 1, 2, 2, 2}};
  for (const double eps : {0.1, 0.2, 0.3})
    check_packed("batch, few rows",
                 moving_dialectical<double>(
                     kGeometry, {.max_steps = 9, .halt_eps = eps, .halting = Halting::batch}),
                 kGeometry, few, everywhere("causal", causal<double>()), {.threads = 2});
}

TEST_CASE("packed sequences of queries that begin at different places", "[packed]") {
  using Turning = OwnAttention<NormedTurned, double>;
  const Turning op = filled<Turning>(kGeometry, false);
  Geometry g = kGeometry;
  g.len_q = 9;
  g.len_kv = 30;
  Packed<double> packed;
  packed.queries = {0, 4, 9};
  packed.keys = {0, 10, 30};
  packed.first_query = {6, 15};
  OpCall<Turning> all(op, g, causal<double>(Align::bottom_right));
  PackedInputs<double> in = all.inputs();
  in.packed = &packed;
  forward(op, in, all.mask, all.out_view());
  for (const std::size_t n : {std::size_t(0), std::size_t(1)}) {
    Geometry own = g;
    own.len_q = packed.queries[n + 1] - packed.queries[n];
    own.len_kv = packed.keys[n + 1] - packed.keys[n];
    own.first_query = packed.first_query[n];
    const auto rows = [&](const std::vector<double>& x, Index heads, bool of_queries) {
      return of_queries ? cut_rows(x, heads, g.len_q, packed.queries[n], own.len_q)
                        : cut_rows(x, heads, g.len_kv, packed.keys[n], own.len_kv);
    };
    OpCall<Turning> one(op, own, all.mask, {},
                        {rows(all.query, 4, true),
                         rows(all.key, 2, false),
                         rows(all.value, 2, false),
                         {},
                         rows(all.grad_out, 4, true)});
    one.forward();
    CHECK(same_bits(rows(all.out, 4, true), one.out));
  }
}

TEST_CASE("packed tensors lie in any layout and format", "[packed]") {
  const Lengths& lengths = kSelf;
  const Packed<float> packed = lengths.packed<float>();
  const Index total = packed.queries.back(), heads = 4, dim = 8;
  const auto count = std::size_t(total * heads * dim);
  const Shape shape{1, heads, total, dim};
  std::vector<float> x(3 * count), dense(3 * count), out(count), out_bthd(count);
  const auto bthd = [&](float* data) { return view_bthd(data, 1, total, heads, dim); };
  for (Index part = 0; part < 3; ++part)
    for (Index h = 0; h < heads; ++h)
      for (Index t = 0; t < total; ++t)
        for (Index c = 0; c < dim; ++c) {
          const float number = float(bfloat16(float(
              CounterRandom(1).normal(std::uint64_t(((part * total + t) * heads + h) * dim + c)))));
          bthd(x.data() + std::size_t(part) * count)(0, h, t, c) = number;
          dense[std::size_t(((part * heads + h) * total + t) * dim + c)] = number;
        }
  const ScaledDot<float> op;
  const auto input = [&](float* from, auto&& view) {
    PackedInputs<float> in({view(from), view(from + count), view(from + 2 * count)});
    in.packed = &packed;
    return in;
  };
  const auto in_rows = [&](float* data) { return TensorView<float>(data, shape); };
  forward(op, input(dense.data(), in_rows), causal<float>(), in_rows(out.data()));
  forward(op, input(x.data(), bthd), causal<float>(), bthd(out_bthd.data()));
  bool same = true;
  for (Index h = 0; h < heads; ++h)
    for (Index t = 0; t < total; ++t)
      for (Index c = 0; c < dim; ++c)
        same = same && in_rows(out.data())(0, h, t, c) == bthd(out_bthd.data())(0, h, t, c);
  CHECK(same);
  // Numbers that bfloat16 holds, and results rounded once.
  std::vector<bfloat16> narrow(dense.begin(), dense.end()), narrow_out(count);
  const auto narrow_view = [&](Index part) {
    return TensorView<const bfloat16>(narrow.data() + std::size_t(part) * count, shape);
  };
  PackedInputs<float> in({narrow_view(0), narrow_view(1), narrow_view(2)});
  in.packed = &packed;
  forward(op, in, causal<float>(), {TensorView<bfloat16>(narrow_out.data(), shape)});
  same = true;
  for (std::size_t i = 0; i < count; ++i)
    same = same && float(narrow_out[i]) == float(bfloat16(out[i]));
  CHECK(same);
}

TEST_CASE("forward mode of packed sequences is that of each", "[packed]") {
  using Op = Differential<double>;
  const Op op;
  const Packed<double> packed = kSelf.packed<double>();
  Geometry g = kGeometry;
  g.len_q = g.len_kv = packed.queries.back();
  const PackedMask<double> mask = bias_of(kSelf, 1, 4, false);
  OpCall<Op> all(op, g, mask.all);
  PackedInputs<double> in = all.inputs();
  in.packed = &packed;
  const std::vector<double> dq = normal_numbers(op, g).grad_out, dv = all.key;
  std::vector<double> db(std::size_t(element_count(mask.bias, "bias")));
  for (std::size_t i = 0; i < db.size(); ++i) db[i] = std::sin(double(i));
  Tangents<double> tangents;
  tangents.query = {dq.data(), g.query_shape()};
  tangents.value = {dv.data(), g.value_shape()};
  tangents.bias = {db.data(), mask.bias};
  std::vector<double> moved(all.out.size()), moved_alone(all.out.size());
  forward(op, in, all.mask, all.out_view(), &all.saved);
  jvp(op, in, all.mask, all.saved, StoredView<const double>(all.out.data(), g.out_shape()),
      tangents, {moved.data(), g.out_shape()});
  jvp(op, in, all.mask, tangents, all.out_view(), {moved_alone.data(), g.out_shape()});
  for (Index n = 0; n < kSelf.count(); ++n) {
    const auto i = std::size_t(n);
    Geometry own = g;
    own.len_q = own.len_kv = kSelf.queries[i];
    const auto rows = [&](const std::vector<double>& x, Index heads) {
      return cut_rows(x, heads, g.len_q, packed.queries[i], own.len_q);
    };
    OpCall<Op> one(
        op, own, mask.of(n), {},
        {rows(all.query, 4), rows(all.key, 2), rows(all.value, 2), {}, rows(all.grad_out, 4)});
    one.forward();
    const std::vector<double> own_dq = rows(dq, 4), own_dv = rows(dv, 2);
    std::vector<double> own_db, own_moved(one.out.size());
    for (Index h = 0; h < 4; ++h)
      for (Index r = 0; r < own.len_q; ++r)
        for (Index c = 0; c < own.len_kv; ++c)
          own_db.push_back(db[std::size_t((h * mask.bias.len + r) * mask.bias.dim + c)]);
    Tangents<double> own_tangents;
    own_tangents.query = {own_dq.data(), own.query_shape()};
    own_tangents.value = {own_dv.data(), own.value_shape()};
    own_tangents.bias = {own_db.data(), one.mask.bias.shape()};
    jvp(op, one.inputs(), one.mask, one.saved,
        StoredView<const double>(one.out.data(), own.out_shape()), own_tangents,
        {own_moved.data(), own.out_shape()});
    CHECK(same_bits(rows(moved, 4), own_moved));
    for (std::size_t k = 0; k < own_moved.size(); ++k)
      CHECK(std::abs(rows(moved_alone, 4)[k] - own_moved[k]) < 1e-12);
  }
}

TEST_CASE("no sequences are packed under every part of a mask, in every door", "[packed]") {
  const Geometry none{1, 4, 4, 2, 0, 0, 6, 6};
  const Packed<double> packed{.queries = {0}};
  const TensorView<const double> no_bias(nullptr, Shape{1, 4, 0, 0});
  const TensorView<const bool> no_pairs(nullptr, Shape{1, 1, 1, 0});
  const TokenValues of_tokens(std::vector<Index>{});
  const auto check = [&](const auto& op, const Mask<double>& mask) {
    using Op = std::remove_cvref_t<decltype(op)>;
    OpCall<Op> call(op, none, {});
    PackedInputs<double> in = call.inputs();
    in.packed = &packed;
    const StoredView<double> out(nullptr, none.out_shape()),
        lse(nullptr, {1, 4, 0, Op::NormaliserType::maps});
    forward(op, in, mask, {out, lse}, &call.saved);
    Op grad_op = op;
    std::vector<double> dbias(7, 1.0);
    Gradients<double> grads{
        {nullptr, none.query_shape()}, {nullptr, none.key_shape()}, {nullptr, none.value_shape()}};
    if (mask.bias.given()) grads.bias = {nullptr, mask.bias.shape()};
    backward(op, in, mask, call.saved, StoredView<const double>(out), StoredView<const double>(out),
             grads, &grad_op);
    for (const double number : numbers_of(grad_op)) CHECK(number == 0);
    const Tangents<double> tangents{{nullptr, none.query_shape()}};
    jvp(op, in, mask, call.saved, StoredView<const double>(out), tangents, {out, lse});
    jvp(op, in, mask, tangents, {out, lse}, {out, lse});
    if constexpr (mergeable<typename Op::NormaliserType>)
      CHECK(forward_partial(op, in, mask).out.empty());
  };
  const Mask<double> masks[] = {causal<double>(),
                                key_lengths<double>({}),
                                key_range<double>(0, 0),
                                documents<double>({}, {}),
                                boolean<double>(no_pairs),
                                bias<double>(no_bias),
                                alibi<double>({1, 1, 1, 1}),
                                visible<double>([of_tokens](auto b, auto, auto i, auto j) {
                                  return of_tokens(b, i) == of_tokens(b, j);
                                })};
  for (const Mask<double>& mask : masks) {
    check(ScaledDot<double>{}, mask);
    check(Differential<double>{}, mask);
  }
}

TEST_CASE("lengths that do not fit are told in one sentence", "[packed]") {
  const Geometry g{1, 2, 2, 2, 10, 10, 4, 4};
  OpCall<ScaledDot<double>> call({}, g);
  Packed<double> packed;
  const auto say = [&](std::vector<Index> queries, std::vector<Index> keys = {},
                       const Mask<double>& mask = {}) {
    packed.queries = std::move(queries);
    packed.keys = std::move(keys);
    PackedInputs<double> in = call.inputs();
    in.packed = &packed;
    return message_of([&] { forward(call.op, in, mask, call.out_view(), &call.saved); });
  };
  CHECK(say({0, 3, 10}) == "nothing was thrown");
  CHECK(say({}) ==
        "heed::forward: packed.queries has 0 numbers, it needs one per sequence, and one more");
  CHECK(say({0}) == "heed::forward: packed.queries ends with 0, query has len 10");
  CHECK(say({1, 3, 10}) == "heed::forward: packed.queries begins with 1, it must begin with 0");
  CHECK(say({0, 7, 3, 10}) ==
        "heed::forward: packed.queries falls from 7 to 3 at sequence 1, no sequence has a negative "
        "length");
  CHECK(say({0, 3, 9}) == "heed::forward: packed.queries ends with 9, query has len 10");
  CHECK(say({0, 3, 10}, {0, 3, 12}) == "heed::forward: packed.keys ends with 12, key has len 10");
  CHECK(say({0, 3, 10}, {0, 2, 5, 10}) ==
        "heed::forward: packed.keys has 4 numbers, packed.queries has 3; both need one per "
        "sequence, and one more");
  CHECK(say({0, 3, 10}, {}, key_lengths<double>({3})) ==
        "heed::forward: key_lengths has 1 entries, there are 2 sequences");
  CHECK(say({0, 3, 10}, {}, key_range<double>(0, 5)) ==
        "heed::forward (sequence 0): key_range is [0, 5), it must lie in [0, 3]");
  CHECK(say({0, 3, 10}, {}, documents<double>({1, 2}, {1, 2})) ==
        "heed::forward: documents has 2 query ids, there are 10 in all sequences");
  std::vector<double> of_bias(100);
  const Mask<double> square =
      bias<double>(TensorView<const double>(of_bias.data(), Shape{1, 1, 10, 10}));
  CHECK(say({0, 3, 10}, {}, square) ==
        "heed::forward: the bias has shape (1,1,10,10), that of packed sequences is of a padded "
        "batch, (1 or 2,heads,1 or 7,7)");
  packed.first_query = {1};
  CHECK(say({0, 3, 10}) ==
        "heed::forward: packed.first_query has 1 numbers, there are 2 sequences");
  packed.first_query.clear();

  // backward() needs saved numbers of the same sequences.
  const auto say_backward = [&](const Saved<double>& saved, std::vector<Index> queries) {
    packed.queries = std::move(queries);
    PackedInputs<double> in = call.inputs();
    if (!packed.queries.empty()) in.packed = &packed;
    return message_of([&] {
      backward(call.op, in, call.mask, saved,
               StoredView<const double>(call.out.data(), g.out_shape()),
               StoredView<const double>(call.grad_out.data(), g.out_shape()), {});
    });
  };
  CHECK(say({0, 3, 10}) == "nothing was thrown");
  CHECK(say_backward(call.saved, {0, 3, 10}) == "nothing was thrown");
  CHECK(say_backward(call.saved, {0, 4, 10}) ==
        "heed::backward (sequence 0): saved is of a call with query and value of shapes (1,2,3,4) "
        "and (1,2,3,4), these are (1,2,4,4) and (1,2,4,4)");
  CHECK(say_backward(call.saved, {0, 4, 7, 10}) ==
        "heed::backward: saved is of a call of 2 packed sequences, this one has 3");
  CHECK(say_backward(call.saved, {0, 5, 10}) ==
        "heed::backward: saved is of sequences with 2 neighbours of different lengths, these have "
        "1");
  CHECK(say_backward(call.saved, {}) ==
        "heed::backward: saved is of a call of 2 packed sequences, this one has 0");
  Saved<double> ordinary;
  forward(call.op, call.inputs(), call.mask, call.out_view(), &ordinary);
  CHECK(say_backward(ordinary, {0, 3, 10}) ==
        "heed::backward: saved is of a call of 0 packed sequences, this one has 2");

  // Only the documents of the second sequence differ between the masks.
  std::vector<Index> ids(10, 1), others = ids;
  others[5] = 2;
  CHECK(say({0, 3, 10}, {}, documents<double>(ids, others)) == "nothing was thrown");
  call.mask = documents<double>(ids, ids);
  CHECK(say_backward(call.saved, {0, 3, 10}) ==
        "heed::backward: saved is of a call with other documents");
  call.mask = documents<double>(ids, others);
  CHECK(say_backward(call.saved, {0, 3, 10}) == "nothing was thrown");
  call.mask = {};

  // Calls on one sequence at a time.
  PackedInputs<double> in = call.inputs();
  packed.queries = {0, 3, 10};
  in.packed = &packed;
  CHECK(message_of([&] { (void)measure_weights(call.op, in, call.mask, call.saved); }) ==
        "heed::measure_weights: packed sequences were given, this takes one of them at a time; "
        "forward() and backward() take them as PackedInputs");
  const Partial<double> part = forward_partial(call.op, in, call.mask);
  forward(call.op, in, call.mask, call.out_view());
  CHECK(same_bits(part.out, call.out));
}
