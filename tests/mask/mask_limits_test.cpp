// SPDX-License-Identifier: Apache-2.0
// Masks, views and options near the ends of an Index's range, and contradictory ones: the right
// answer or one sentence, never an overflow.

#include "catch.hpp"
#include "message_of.hpp"
// Sanitizers end the program in their own operator new, where it should throw.
#include "conformance/counting_new.hpp"

#include <heed/check/op_call.hpp>
#include <heed/compiled.hpp>
#include <heed/explain.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>

#include <cstring>
#include <limits>
#include <type_traits>

using namespace heed;
using heed_test::message_of;

namespace {

constexpr Index kMost = std::numeric_limits<Index>::max(),
                kLeast = std::numeric_limits<Index>::min();
constexpr Geometry kG{2, 2, 2, 1, 37, 41, 4, 4};

struct Result {
  std::vector<float> out, dquery, dkey;
  bool operator==(const Result&) const = default;
};

[[nodiscard]] Result run(const Mask<float>& mask,
                         Options options = {.key_tile = 1, .panel_vectors = 1},
                         const Geometry& g = kG) {
  OpCall<ScaledDot<float>> call({}, g, mask, options);
  call.forward();
  call.backward();
  return {call.out, call.grad_query, call.grad_key};
}
[[nodiscard]] bool all_zero(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float v) { return v == 0; });
}
[[nodiscard]] bool has(const std::string& text, const char* words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE("windows as wide as an Index are open windows") {
  const Result open = run({}), causal_result = run(causal<float>());
  for (const Index far : {kMost, kMost - 1, kMost / 2, kMost / 4, Index(1) << 40}) {
    INFO("far " << far);
    CHECK(run(window<float>(far, far)) == open);
    CHECK(run(window<float>(far, -1)) == open);
    CHECK(run(window<float>(far, 0)) == causal_result);
    CHECK(run(window<float>(0, far)) == run(window<float>(0, -1)));
    CHECK(run(causal<float>(Align::top_left, far)) == open);
    CHECK(run(causal<float>(Align::bottom_right, far)) == open);
    // p - left: far to the right and as far to the left.
    CHECK(run(window<float>(far, -1, Align::top_left, far)) == run(window<float>(0, -1)));
    CHECK(run(window<float>(far - 3, -1, Align::top_left, far)) ==
          run(window<float>(0, -1, Align::top_left, 3)));
    CHECK(run(window<float>(-1, far, Align::top_left, -far)) == causal_result);
  }
}

TEST_CASE("windows whose offset and right side add up beyond an Index are open windows") {
  const Result open = run({});
  for (const Align align : {Align::top_left, Align::bottom_right}) {
    CHECK(run(window<float>(-1, kMost, align, kMost)) == open);
    CHECK(run(window<float>(-1, 5, align, kMost - 2)) == open);
  }
}

TEST_CASE("windows that lie behind every key hide all") {
  for (const Mask<float>& mask :
       {causal<float>(Align::top_left, kLeast), causal<float>(Align::bottom_right, kLeast),
        window<float>(0, 0, Align::top_left, kMost),
        window<float>(kMost / 2, 0, Align::bottom_right, kMost),
        window<float>(5, 5, Align::top_left, kLeast)}) {
    const Result r = run(mask);
    CHECK(all_zero(r.out));
    CHECK(all_zero(r.dquery));
    CHECK(all_zero(r.dkey));
  }
}

TEST_CASE("bands that contradict each other hide all") {
  for (const Mask<float>& mask :
       {causal<float>(Align::top_left, -5) & window<float>(2, -1),
        window<float>(0, 0) & window<float>(0, 0, Align::top_left, 7),
        causal<float>(Align::top_left, kLeast) & window<float>(0, -1, Align::top_left, kMost)})
    for (const Options& options : {Options{}, Options{.key_tile = 1, .panel_vectors = 1}}) {
      const Result r = run(mask, options);
      CHECK(all_zero(r.out));
      CHECK(all_zero(r.dquery));
      CHECK(all_zero(r.dkey));
      CHECK(explain(ScaledDot<float>{}, kG, mask).visible_flops == 0);
    }
}

TEST_CASE("tiles wider than the row are one tile, and take no memory for more") {
  const Geometry g{1, 1, 1, 1, 70, 70, 4, 4};
  const Result usual = run({}, {.key_tile = 128}, g);
  for (const Index tile : {Index(1) << 12, Index(1) << 30, Index(1) << 40, kMost}) {
    CHECK(run({}, {.key_tile = tile}, g) == usual);
    CHECK(explain(ScaledDot<float>{}, g, {}, Pass::backward, {.key_tile = tile}).scratch_bytes <
          (1 << 20));
  }
}

TEST_CASE("as many steps as an int holds ask for as much memory, or none is to be had") {
  ResonantOde<float> op;
  op.normaliser.steps = std::numeric_limits<int>::max();
  const Geometry g{1, 1, 1, 1, 4, 4, 4, 4};
  CHECK(explain(op, g, {}, Pass::backward).scratch_bytes > (Index(1) << 36));
  // Rows of that many steps and keys leave the address space.
  CHECK_THROWS_AS(explain(op, {1, 1, 1, 1, 4, Index(1) << 40, 4, 4}, {}, Pass::backward),
                  std::bad_alloc);
}

TEST_CASE("lists that are given and empty are no missing lists") {
  CHECK(has(message_of([] { (void)run(key_lengths<float>({})); }),
            "key_lengths has 0 entries, the batch is 2"));
  CHECK(has(message_of([] { (void)run(alibi<float>({})); }),
            "alibi has 0 slopes, there are 2 heads"));
  CHECK(has(message_of([] { (void)run(documents<float>({}, {})); }),
            "documents has 0 query ids, there are 74"));
  CHECK(
      has(message_of([] {
            (void)run(alibi<float>({1, 1}, Align::bottom_right, std::numeric_limits<Index>::min()));
          }),
          "alibi has offset -9223372036854775808, it must lie between -536870912 and 536870912"));
  Mask<float> half;
  half.key_documents = std::vector<Index>(82);
  CHECK(has(message_of([&] { (void)run(half); }), "documents has no query ids"));
  const Geometry none{0, 2, 2, 1, 37, 41, 4, 4};
  CHECK_NOTHROW(run(key_lengths<float>({}), {}, none));
}

TEST_CASE("a soft cap that is set by hand is checked like one that is built") {
  for (const float cap : {std::nanf(""), -1.0F, std::numeric_limits<float>::infinity()}) {
    Mask<float> mask;
    mask.soft_cap = cap;
    CHECK(has(message_of([&] { (void)run(mask); }), "soft_cap is "));
  }
}

TEST_CASE("views whose sizes or strides leave an Index are refused in a sentence") {
  float x[64] = {};
  const Index big = Index(1) << 40;
  CHECK(has(message_of([&] {
              (void)TensorView<float>(x, {1, big, big, 4});
            }),
            "overflows a 64-bit index"));
  CHECK(has(message_of([&] { (void)view_bthd(x, 1, big, big, 4); }), "overflows a 64-bit index"));
  CHECK(has(message_of([&] { (void)view_packed(x, 1, big, big, 4, 3, 2); }),
            "overflows a 64-bit index"));
  const TensorView<const float> far(x, {2, 1, 4, 4}, {kMost, 16, 4}),
      wide(x, {1, 3, 4, 4}, {0, kMost / 2, 4});
  for (const auto& view : {far, wide})
    CHECK(has(message_of([&] {
                const TensorView<const float> key(x, {view.shape().batch, 1, 4, 4});
                std::vector<float> out(64);
                forward(ScaledDot<float>{}, {view, key, key}, {},
                        TensorView<float>(out.data(), view.shape()));
              }),
              "64-bit index"));
}

TEST_CASE("an output inside an input that runs backwards in memory is found") {
  std::vector<float> memory(200);
  const Shape s{1, 1, 10, 4};
  // Rows from the end of the first 40 numbers to their start.
  const TensorView<const float> reversed(memory.data() + 36, s, {0, 0, -4}),
      key(memory.data() + 100, s);
  const TensorView<float> inside(memory.data(), s), beside(memory.data() + 40, s);
  CHECK(has(message_of([&] {
              forward(ScaledDot<float>{}, {reversed, key, key}, {}, inside);
            }),
            "out overlaps query"));
  CHECK_NOTHROW(forward(ScaledDot<float>{}, {reversed, key, key}, {}, beside));
}

TEST_CASE("an output over the last rows of an input that runs backwards in memory is found") {
  std::vector<float> memory(200);
  const Shape s{1, 1, 10, 4};
  // Row 0 stands at 96, the last one at 60, where the output ends.
  const TensorView<const float> reversed(memory.data() + 96, s, {0, 0, -4}),
      key(memory.data() + 100, s);
  const TensorView<float> over(memory.data() + 24, s), before(memory.data() + 20, s);
  CHECK(has(message_of([&] {
              forward(ScaledDot<float>{}, {reversed, key, key}, {}, over);
            }),
            "out overlaps query"));
  CHECK_NOTHROW(forward(ScaledDot<float>{}, {reversed, key, key}, {}, before));
}

TEST_CASE("a boolean mask takes the type of what it is joined with or given to") {
  const bool pairs[] = {true, false, true, false, true, true};
  const TensorView<const bool> allowed(pairs, Shape{1, 1, 2, 3});
  const auto joined = causal<float>() & boolean(allowed);
  STATIC_REQUIRE(std::is_same_v<decltype(joined), const Mask<float>>);
  CHECK(joined.allowed.data() == pairs);
  CHECK(joined.bands.size() == 1);
  CHECK((boolean(allowed) & causal<double>()).allowed.data() == pairs);
  CHECK(has(message_of([&] { (void)(boolean<float>(allowed) & boolean(allowed)); }),
            "both sides of & have a boolean mask"));
  const double x[] = {1, 2, 3, 4, 5, 6};
  double out[4] = {};
  forward(ScaledDot<double>{}, {{x, {1, 1, 2, 2}}, {x, {1, 1, 3, 2}}, {x, {1, 1, 3, 2}}},
          boolean({pairs + 3, Shape{1, 1, 1, 3}}), {out, {1, 1, 2, 2}});
  CHECK(out[0] > 3);  // the first key is hidden from both
  CHECK(out[2] > 3);
}

TEST_CASE("a gradient over the boolean mask is refused") {
  const Shape s{1, 1, 8, 4};
  alignas(float) bool memory[8 * 8 + 8 * 4 * sizeof(float)] = {};
  const Mask<float> mask = boolean<float>(TensorView<const bool>(memory, Shape{1, 1, 8, 8}));
  std::vector<float> x(32), out(32);
  const TensorView<const float> in(x.data(), s);
  Saved<float> saved;
  forward(ScaledDot<float>{}, {in, in, in}, mask, {out.data(), s}, &saved);
  const TensorView<float> over(reinterpret_cast<float*>(memory + 32), s);
  CHECK(has(message_of([&] {
              backward(ScaledDot<float>{}, {in, in, in}, mask, saved,
                       TensorView<const float>(out.data(), s), in, {over, {}, {}, {}, {}});
            }),
            "grad_query overlaps the boolean mask"));
}

TEST_CASE("saved numbers of another call are refused with what differs") {
  const Shape s{1, 2, 12, 4};
  std::vector<float> x(96, 0.5F), out(96), dq(96);
  const TensorView<const float> in(x.data(), s);
  const auto back = [&](const auto& op, const Mask<float>& mask, const Saved<float>& saved,
                        const Options& options) {
    return message_of([&] {
      backward(op, {in, in, in}, mask, saved, TensorView<const float>(out.data(), s), in,
               {{dq.data(), s}, {}, {}, {}, {}}, nullptr, options);
    });
  };
  Saved<float> saved;
  CHECK(has(back(ScaledDot<float>{}, {}, saved, {}), "saved holds nothing"));
  forward(ScaledDot<float>{}, {in, in, in}, causal<float>(), {out.data(), s}, &saved,
          {.scale = 0.25});
  CHECK(back(ScaledDot<float>{}, causal<float>(), saved, {.scale = 0.25}) == "nothing was thrown");
  CHECK(has(back(Dar<float>{}, causal<float>(), saved, {.scale = 0.25}), "another op"));
  CHECK(has(back(ScaledDot<float>{}, causal<float>(), saved, {}),
            "with scale 0.25, this one has 0.5"));
  CHECK(
      has(back(ScaledDot<float>{}, {}, saved, {.scale = 0.25}), "with bands, this one is without"));
  CHECK(has(back(ScaledDot<float>{}, causal<float>() & soft_cap<float>(2), saved, {.scale = 0.25}),
            "without a soft cap, this one is with"));
  CHECK(has(back(ScaledDot<float>{}, causal<float>(), saved,
                 {.scale = 0.25, .dropout = {.rate = 0.5, .seed = 3}}),
            "with dropout 0 and seed 0, this one has 0.5 and 3"));
  // Parts of the same kinds, with other values; and a mask that was made anew.
  const auto of_masks = [&](const Mask<float>& forwards, const Mask<float>& backwards) {
    forward(ScaledDot<float>{}, {in, in, in}, forwards, {out.data(), s}, &saved);
    return back(ScaledDot<float>{}, backwards, saved, {});
  };
  const std::string of_call = "heed::backward: saved is of a call with ";
  CHECK(of_masks(causal<float>(), causal<float>(Align::top_left, 1)) ==
        of_call +
            "the bands (left -1, right 0, offset 0, top_left), this one has (left -1, right "
            "0, offset 1, top_left)");
  CHECK(of_masks(key_range<float>(0, 4) & key_range<float>(1, 9), key_range<float>(0, 5)) ==
        of_call + "the key ranges [0, 4) & [1, 9), this one has [0, 5)");
  CHECK(of_masks(soft_cap<float>(2.5F), soft_cap<float>(2)) ==
        of_call + "a soft cap of 2.5, this one has 2");
  CHECK(of_masks(key_lengths<float>({7}), key_lengths<float>({8})) ==
        of_call + "other key lengths");
  CHECK(of_masks(alibi<float>({0.5F, 0.25F}), alibi<float>({0.25F, 0.5F})) ==
        of_call + "other slopes");
  CHECK(of_masks(alibi<float>({0.5F, 0.25F}), alibi<float>({0.5F, 0.25F}, Align::bottom_right)) ==
        of_call + "other slopes");
  CHECK(of_masks(alibi<float>({0.5F, 0.25F}), alibi<float>({0.5F, 0.25F}, Align::top_left, 1)) ==
        of_call + "other slopes");
  CHECK(of_masks(alibi<float>({0.5F, -0.0F}), alibi<float>({0.5F, 0.0F})) == "nothing was thrown");
  std::vector<Index> ids(12, 3), others = ids;
  others[7] = 4;
  CHECK(of_masks(documents<float>(ids, ids), documents<float>(ids, others)) ==
        of_call + "other documents");
  CHECK(of_masks(documents<float>(others, ids), documents<float>(ids, others)) ==
        of_call + "other documents");
  const std::vector<float> zeros(144), again(144);
  const auto added = [](const std::vector<float>& values, Index rows) {
    return bias<float>({values.data(), Shape{1, 1, rows, 12}});
  };
  CHECK(of_masks(added(zeros, 1), added(zeros, 12)) ==
        of_call + "a bias of shape (1,1,1,12), this one's has (1,1,12,12)");
  CHECK(of_masks(added(zeros, 12), added(again, 12)) == "nothing was thrown");
  const std::unique_ptr<bool[]> shown(new bool[144]());
  const auto allow = [&](Index rows) {
    return boolean<float>({shown.get(), Shape{1, 1, rows, 12}});
  };
  CHECK(of_masks(allow(12), allow(1)) ==
        of_call + "a boolean mask of shape (1,1,12,12), this one's has (1,1,1,12)");
  const std::string rules = of_call + "other functions of positions or block lists";
  const auto lists = [](Index block) { return block_lists<float>({12, 4, {0, 2}, {0, block}}); };
  CHECK(of_masks(lists(1), lists(2)) == rules);
  CHECK(of_masks(lists(1), lists(1)) == "nothing was thrown");
  const auto function = [](Align align, Index offset) {
    return visible<float>([](auto, auto, auto i, auto j) { return j <= i; }, align, offset);
  };
  CHECK(of_masks(function(Align::top_left, 0), function(Align::top_left, 1)) == rules);
  CHECK(of_masks(!function(Align::top_left, 2), !function(Align::top_left, 1)) == rules);
  CHECK(of_masks(lists(1) | lists(2), lists(2) | lists(1)) == rules);
  const auto parts = [&](Index offset) {
    return causal<float>(Align::top_left, offset) | key_lengths<float>({3});
  };
  CHECK(of_masks(parts(1), parts(2)) == rules);
  const BlockMask<float> blocks(parts(1), {1, 2, 2, 2, 12, 12, 4, 4});
  CHECK(of_masks(blocks, parts(1)) == "nothing was thrown");
  CHECK(of_masks(blocks, parts(2)) == rules);
  forward(ScaledDot<float>{}, {in, in, in}, causal<float>(), {out.data(), s}, &saved,
          {.scale = 0.25});
  // As many numbers, other sizes.
  const Shape turned{2, 1, 12, 4};
  const TensorView<const float> other(x.data(), turned);
  CHECK(has(message_of([&] {
              backward(ScaledDot<float>{}, {other, other, other}, causal<float>(), saved,
                       TensorView<const float>(out.data(), turned), other, {}, nullptr,
                       {.scale = 0.25});
            }),
            "of shapes (1,2,12,4) and (1,2,12,4), these are (2,1,12,4) and (2,1,12,4)"));
  // A call that fails leaves no saved numbers that backward() would accept.
  CHECK_THROWS(forward(ScaledDot<float>{}, {in, in, in}, causal<float>(), {x.data(), s}, &saved,
                       {.scale = 0.25}));
  CHECK(has(back(ScaledDot<float>{}, causal<float>(), saved, {.scale = 0.25}),
            "saved holds nothing"));
}

TEST_CASE("a block mask is skipped in tiles that the mask asks for, and explain says so") {
  const Index len = 1024, block = 128;
  std::unique_ptr<bool[]> allowed(new bool[std::size_t(len * len)]);
  for (Index i = 0; i < len; ++i)
    for (Index j = 0; j < len; ++j)
      allowed[std::size_t(i * len + j)] = (i / block + j / block) % 2 == 0;
  const Mask<float> mask =
      boolean<float>(TensorView<const bool>(allowed.get(), Shape{1, 1, len, len}));
  const Geometry g{1, 1, 1, 1, len, len, 16, 16};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Explanation chosen = explain(ScaledDot<float>{}, g, mask, pass);
    const Explanation wide = explain(ScaledDot<float>{}, g, mask, pass, {.key_tile = 512});
    CHECK(chosen.key_tile <= block);
    CHECK(chosen.computed_flops == Approx(wide.computed_flops / 2));
    CHECK(has(chosen.text(), "the mask hides blocks, such tiles compute 50 % of the pairs"));
  }
  const auto results = [&](const Options& options) { return run(mask, options, g); };
  const Result a = results({}), b = results({.key_tile = 512});
  for (std::size_t n = 0; n < a.out.size(); ++n) CHECK(a.out[n] == Approx(b.out[n]).margin(1e-5));
  // Without blocks to skip the plan is the same.
  const Explanation open = explain(ScaledDot<float>{}, g),
                    causal_plan = explain(ScaledDot<float>{}, g, causal<float>());
  CHECK(open.key_tile == causal_plan.key_tile);
  for (Index n = 0; n < len * len; ++n) allowed[std::size_t(n)] = n % 3 != 0;
  const Explanation scattered = explain(ScaledDot<float>{}, g, mask);
  CHECK(scattered.key_tile == open.key_tile);
  CHECK(has(scattered.text(), "hardly a whole block"));
}
