// SPDX-License-Identifier: Apache-2.0
// Tensors of 16-bit numbers: a call on them has the bits of a call on widened copies, rounded once. Keys and values of
// int8 with a scale per row: a call on them has the bits of one on the floats that they stand for.

#include "conformance/compare.hpp"

#include <heed/kv_cache.hpp>

#include <array>

#include <unsupported/Eigen/CXX11/Tensor>

#include "message_of.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true};

// The numbers of `from` as To, in a layout of its own.
template <class To, class From>
[[nodiscard]] Tensor<To> copy_as(const Tensor<From>& from, Layout layout = Layout::dense) {
  if (!from.given()) return {};
  Tensor<To> to(from.shape(), layout);
  const Shape& s = from.shape();
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        for (Index c = 0; c < s.dim; ++c) to(b, h, t, c) = To(float(from(b, h, t, c)));
  return to;
}

// The floats that a stored tensor stands for.
template <class View>
[[nodiscard]] Tensor<float> floats_of(const View& view) {
  const Shape& s = view.shape();
  Tensor<float> to(s);
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        for (Index c = 0; c < s.dim; ++c) to(b, h, t, c) = float(view(b, h, t, c));
  return to;
}

// Rows of a tensor as int8 numbers with scales, in one piece.
struct Int8Rows {
  Shape shape;
  std::vector<std::int8_t> numbers;
  std::vector<float> scales;

  explicit Int8Rows(const Tensor<float>& from) : shape(from.shape()) {
    const std::vector<float> dense = from.dense();
    numbers.resize(dense.size());
    for (std::size_t at = 0; at < dense.size(); at += std::size_t(shape.dim))
      scales.push_back(heed::quantise(dense.data() + at, shape.dim, numbers.data() + at));
  }
  [[nodiscard]] heed::ScaledView view() const {
    return {heed::TensorView<const std::int8_t>(numbers.data(), shape),
            heed::TensorView<const float>(scales.data(), {shape.batch, shape.heads, shape.len, 1})};
  }
};

// A call on 16-bit numbers, and one on the same numbers as floats.
template <class Narrow>
struct TwoCalls {
  Call<float> wide;
  Tensor<Narrow> query, key, value, extra, grad_out;

  TwoCalls(const Runner<float>& runner, Layout layout)
      : wide(random_call<float>(runner.geometry, runner.extra_dim)) {
    const auto store = [&](Tensor<float>& from, Tensor<Narrow>& to) {
      to = copy_as<Narrow>(from, layout);
      from = copy_as<float>(to);
    };
    store(wide.query, query);
    store(wide.key, key);
    store(wide.value, value);
    store(wide.extra, extra);
    store(wide.grad_out, grad_out);
  }
  [[nodiscard]] heed::Inputs<float> inputs() const {
    return {query.view(), key.view(), value.view(), extra.view()};
  }
};

[[nodiscard]] std::vector<Geometry> geometries() {
  return {geometry(2, 4, 2, 1, 45, 8, 8),   // decoding, two heads of a group
          geometry(1, 4, 2, 3, 70, 6, 10),  // few queries
          geometry(2, 4, 2, 33, 33, 12, 12), geometry(1, 2, 1, 40, 150, 8, 8)};
}

[[nodiscard]] std::vector<MaskCase<float>> masks() {
  return {{"none", [](const Geometry&) { return OwnedMask<float>{}; }},
          {"window and lengths", [](const Geometry& g) {
             return owned(heed::window<float>(21, 0, heed::Align::bottom_right)) &
                    owned(heed::key_lengths<float>(shrinking_lengths(g)));
           }}};
}

// A softmax whose heads take the keys of all key-value heads in turn.
struct KeysInTurn : heed::Softmax<float> {
  [[nodiscard]] heed::Source source(const Geometry& g, Index h, int) const {
    return {h, h % g.kv_heads, 0, 0, g.dim_qk};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("a call on 16-bit tensors has the bits of one on widened copies, rounded",
                   "[stored]", heed::bfloat16, heed::half) {
  using Narrow = TestType;
  for (const Geometry& g : geometries())
    for (const auto& mask : masks())
      for (const heed::Options& options : {heed::Options{}, small_tiles(2)})
        for (const Runner<float>& runner : all_runners<float, kNeeds>(g)) {
          INFO(runner.name << ", mask " << mask.name << ", len_q " << g.len_q << ", key_tile "
                           << options.key_tile);
          TwoCalls<Narrow> calls(runner, Layout::reversed);
          calls.wide.options = options;
          calls.wide.mask = mask.make(runner.geometry);
          const Outcome<float> wide = forward(runner, calls.wide);
          Tensor<Narrow> out(wide.out.shape(), Layout::bthd);
          heed::Saved<float> saved;
          runner.forward(calls.inputs(), calls.wide.mask.mask, out.view(), &saved, options);
          CHECK(out.untouched());
          CHECK(same_bits(out.dense(), copy_as<Narrow>(wide.out).dense()));
          CHECK(same_bits(saved.lse, wide.saved.lse));

          // Backward of the float call gets the rounded results of forward.
          const Outcome<float> rounded{copy_as<float>(out), wide.saved};
          const Named wanted = backward(runner, calls.wide, rounded);
          Tensor<Narrow> grads[] = {Tensor<Narrow>(calls.query.shape(), Layout::padded),
                                    Tensor<Narrow>(calls.key.shape()),
                                    Tensor<Narrow>(calls.value.shape()),
                                    Tensor<Narrow>(calls.extra.shape())};
          const Named parameters = runner.backward(
              calls.inputs(), calls.wide.mask.mask, saved, out.view(), calls.grad_out.view(),
              {grads[0].view(), grads[1].view(), grads[2].view(), grads[3].view(), {}}, options);
          CHECK(grads[0].untouched());
          const char* names[] = {"query", "key", "value", "extra"};
          for (const auto& tensor : wanted) {
            const auto input = std::find(std::begin(names), std::end(names), tensor.name);
            const auto parameter =
                std::find_if(parameters.begin(), parameters.end(),
                             [&](const auto& p) { return p.name == tensor.name; });
            REQUIRE((input != std::end(names) || parameter != parameters.end()));
            INFO(tensor.name);
            if (input == std::end(names)) {
              CHECK(same_bits(parameter->values, tensor.values));
              continue;
            }
            std::vector<Narrow> numbers;
            for (const double x : tensor.values) numbers.push_back(Narrow(float(x)));
            CHECK(same_bits(grads[input - std::begin(names)].dense(), numbers));
          }
        }
}

TEMPLATE_TEST_CASE("each tensor may be stored in 16 bits by itself", "[stored]", heed::bfloat16,
                   heed::half) {
  using Narrow = TestType;
  for (const Index len_q : {Index(1), Index(20)})
    for (const Runner<float>& runner :
         runners<float, kNeeds>(geometry(2, 4, 2, len_q, len_q == 1 ? 50 : len_q, 8, 8))) {
      const TwoCalls<Narrow> calls(runner, Layout::padded);
      const Outcome<float> wide = forward(runner, calls.wide);
      for (int which = 0; which < 4; ++which) {
        INFO(runner.name << ", tensor " << which);
        heed::Inputs<float> in = calls.wide.inputs();
        if (which == 0) in.query = calls.query.view();
        if (which == 1) in.key = calls.key.view();
        if (which == 2) in.value = calls.value.view();
        if (which == 3) in.extra = calls.extra.view();
        Tensor<float> out(wide.out.shape());
        runner.forward(in, {}, out.view(), nullptr, calls.wide.options);
        CHECK(same_bits(out.dense(), wide.out.dense()));
      }
    }
}

TEMPLATE_TEST_CASE("heads read the keys that source() names", "[stored]", heed::DotScore<float>,
                   heed::DarScore<float>) {
  const heed::Attention<float, TestType, KeysInTurn, heed::Identity<float>> op;
  for (const Index len_q : {Index(1), Index(40)}) {
    INFO("len_q " << len_q);
    const Geometry g = geometry(1, 6, 3, len_q, 40, 8, 8);
    const Call<float> call = random_call<float>(g, 0);
    const auto key = copy_as<heed::bfloat16>(call.key);
    const auto wide_key = copy_as<float>(key);
    Tensor<float> out(call.grad_out.shape()), wanted(call.grad_out.shape());
    const heed::Options options = small_tiles();
    heed::forward(op, {call.query.view(), key.view(), call.value.view()}, {}, out.view(), nullptr,
                  options);
    heed::forward(op, {call.query.view(), wide_key.view(), call.value.view()}, {}, wanted.view(),
                  nullptr, options);
    CHECK(same_bits(out.dense(), wanted.dense()));
  }
}

TEMPLATE_TEST_CASE("a call on a cache has the bits of one on the floats that it stands for",
                   "[stored]", heed::bfloat16, heed::half, std::int8_t) {
  using Stored = TestType;
  const Index page = heed::kPanelLanes<float>, len = 2 * page + 5;
  for (const Index len_q : {Index(1), Index(5), Index(30)})
    for (const Runner<float>& runner :
         runners<float, kNeeds>(geometry(2, 4, 2, len_q, len, 8, 8))) {
      INFO(runner.name << ", len_q " << len_q);
      const Geometry& g = runner.geometry;
      Call<float> call = random_call<float>(g, runner.extra_dim);
      heed::KvCache<Stored> cache(g.batch, g.kv_heads, g.dim_qk, g.dim_v, page);
      cache.append(call.key.view(), call.value.view());
      if constexpr (!heed::KvCache<Stored>::scaled) {
        CHECK(same_bits(floats_of(cache.keys()).dense(),
                        copy_as<float>(copy_as<Stored>(call.key)).dense()));
        CHECK(same_bits(floats_of(cache.values()).dense(),
                        copy_as<float>(copy_as<Stored>(call.value)).dense()));
      }
      heed::Inputs<float> in = call.inputs();
      in.key = cache.keys();
      in.value = cache.values();
      call.key = floats_of(cache.keys());
      call.value = floats_of(cache.values());
      call.options.key_tile = 1;  // tiles that the page allows
      Tensor<float> out(call.grad_out.shape());
      runner.forward(in, {}, out.view(), nullptr, call.options);
      CHECK(same_bits(out.dense(), forward(runner, call).out.dense()));
    }
}

TEST_CASE("a call on int8 rows in one piece has the bits of one on what they stand for",
          "[stored]") {
  for (const Geometry& g : geometries())
    for (const Runner<float>& runner : runners<float, kNeeds>(g)) {
      INFO(runner.name << ", len_q " << runner.geometry.len_q);
      Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
      const Int8Rows key(call.key), value(call.value);
      call.key = floats_of(key.view());
      call.value = floats_of(value.view());
      heed::Inputs<float> in = call.inputs();
      in.key = key.view();
      in.value = value.view();
      const Outcome<float> wide = forward(runner, call);
      Tensor<float> out(wide.out.shape());
      heed::Saved<float> saved;
      runner.forward(in, {}, out.view(), &saved, call.options);
      CHECK(same_bits(out.dense(), wide.out.dense()));

      const auto gradients = [&](const heed::Inputs<float>& of) {
        Tensor<float> dq(call.query.shape()), dk(call.key.shape()), dv(call.value.shape());
        runner.backward(of, {}, saved, heed::TensorView<const float>(out.view()),
                        call.grad_out.view(), {dq.view(), dk.view(), dv.view()}, call.options);
        return std::array{dq.dense(), dk.dense(), dv.dense()};
      };
      const auto got = gradients(in), wanted = gradients(call.inputs());
      for (std::size_t n = 0; n < got.size(); ++n) CHECK(same_bits(got[n], wanted[n]));
    }
}

TEST_CASE("a view of int8 rows says what does not fit", "[stored]") {
  const std::int8_t numbers[12] = {};
  const float scales[3] = {1, 1, 1};
  const heed::TensorView<const std::int8_t> rows(numbers, {1, 1, 3, 4});
  const auto message = [&](const Shape& shape, const float* data) {
    return message_of([&] { heed::ScaledView(rows, heed::TensorView<const float>(data, shape)); });
  };
  CHECK(message({1, 1, 3, 1}, scales) == "nothing was thrown");
  CHECK(message({1, 1, 2, 1}, scales) ==
        "ScaledView: scales have shape (1,1,2,1), they must be (1,1,3,1)");
  CHECK(message({1, 1, 3, 1}, nullptr) ==
        "ScaledView: scales have a null pointer and shape (1,1,3,1)");
  const float* pages[] = {scales};
  const auto paged = heed::TensorView<const float>::paged(pages, heed::kPanelLanes<float>,
                                                          {1, 1, 3, 1}, {3, 3, 1});
  CHECK(message_of([&] { heed::ScaledView(rows, paged); }) ==
        "ScaledView: scales have pages of " + std::to_string(heed::kPanelLanes<float>) +
            " rows, the numbers of 0");
}

TEST_CASE("NaN and infinity of 16-bit tensors show or hide as those of floats do", "[stored]") {
  const float inf = std::numeric_limits<float>::infinity();
  const Shape row{1, 1, 1, 4}, rows{1, 1, 3, 4};
  Tensor<heed::bfloat16> query(row), key(rows), value(rows);
  query.fill(heed::bfloat16(1.0f));
  key.fill(heed::bfloat16(0.5f));
  value.fill(heed::bfloat16(2.0f));
  key(0, 0, 2, 1) = heed::bfloat16(inf);
  value(0, 0, 2, 3) = heed::bfloat16(std::numeric_limits<float>::quiet_NaN());
  Tensor<float> out(row);
  const heed::ScaledDot<float> op;
  heed::forward(op, {query.view(), key.view(), value.view()}, heed::key_lengths<float>({2}),
                out.view());
  CHECK(out.dense() == std::vector<float>(4, 2.0f));
  heed::forward(op, {query.view(), key.view(), value.view()}, {}, out.view());
  for (const float x : out.dense()) CHECK(std::isnan(x));
}

TEST_CASE("16-bit tensors of Eigen are read and written in place", "[stored]") {
  using Half = Eigen::Tensor<Eigen::half, 4, Eigen::RowMajor>;
  using Brain = Eigen::Tensor<Eigen::bfloat16, 4, Eigen::RowMajor>;
  Half query(1, 2, 3, 4), out(1, 2, 3, 4);
  Brain key(1, 2, 5, 4), value(1, 2, 5, 4);
  Tensor<float> q({1, 2, 3, 4}), k({1, 2, 5, 4}), v({1, 2, 5, 4}), wanted({1, 2, 3, 4});
  q.randomise(1), k.randomise(2), v.randomise(3);
  const auto store = [](const Tensor<float>& from, auto& to) {
    using Number = std::remove_cvref_t<decltype(to(0, 0, 0, 0))>;
    const Shape& s = from.shape();
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        for (Index c = 0; c < s.dim; ++c) to(0, h, t, c) = Number(from(0, h, t, c));
  };
  store(q, query), store(k, key), store(v, value);
  heed::forward(heed::Dar<float>{}, {query, key, value}, heed::causal<float>(), out);
  const auto q16 = copy_as<float>(copy_as<heed::half>(q));
  const auto k16 = copy_as<float>(copy_as<heed::bfloat16>(k)),
             v16 = copy_as<float>(copy_as<heed::bfloat16>(v));
  heed::forward(heed::Dar<float>{}, {q16.view(), k16.view(), v16.view()}, heed::causal<float>(),
                wanted.view());
  for (Index h = 0; h < 2; ++h)
    for (Index t = 0; t < 3; ++t)
      for (Index c = 0; c < 4; ++c)
        CHECK(float(out(0, h, t, c)) == float(heed::half(wanted(0, h, t, c))));
}

TEST_CASE("the doors check 16-bit tensors as they check floats", "[stored]") {
  Tensor<heed::half> query({1, 2, 3, 4}), key({1, 2, 5, 4}), value({1, 2, 5, 6}), out({1, 2, 3, 6});
  const heed::ScaledDot<float> op;
  const auto message = [&](const heed::Inputs<float>& in, const heed::StoredView<float>& to) {
    return message_of([&] { heed::forward(op, in, {}, to); });
  };
  CHECK(message({query.view(), key.view(), value.view()}, out.view()) == "nothing was thrown");
  CHECK(message({query.view(), value.view(), value.view()}, out.view()) ==
        "heed::forward: key has dim_qk 6, query has 4");
  CHECK(message({query.view(), key.view(), value.view()}, query.view()) ==
        "heed::forward: out has shape (1,2,3,4), it must be (1,2,3,6)");
  Tensor<heed::half> square({1, 2, 5, 4});
  CHECK(message({square.view(), square.view(), square.view()}, square.view()) ==
        "heed::forward: out overlaps query");
  const auto* data = query.view().data();
  const heed::TensorView<const heed::half> null(nullptr, {1, 2, 3, 4});
  CHECK(message({null, key.view(), value.view()}, out.view()) ==
        "heed::forward: query has a null pointer and shape (1,2,3,4)");
  const auto* odd = reinterpret_cast<const heed::half*>(reinterpret_cast<const char*>(data) + 1);
  CHECK(message({heed::TensorView<const heed::half>(odd, {1, 2, 1, 4}), key.view(), value.view()},
                out.view()) ==
        "heed::forward: query lies 1 bytes past a multiple of 2, it must be aligned to 2 bytes");
}
