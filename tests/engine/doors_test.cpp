// SPDX-License-Identifier: Apache-2.0
// Public calls: the errors and their words, the memory that they read in place, and the end of memory.

#include "conformance/compare.hpp"
#include "conformance/counting_new.hpp"

#include <heed/explain.hpp>

#include <Eigen/Core>
#include <unsupported/Eigen/CXX11/Tensor>

#include <array>

using namespace heed_test;
using heed::TensorView;

namespace {

constexpr Needs kNeeds{.backward = true};
using View = TensorView<float>;
using ConstView = TensorView<const float>;

// A valid call of scaled dot-product attention, to be changed: batch 2, heads 4, kv_heads 2, len_q
// 5, len_kv 7, dim_qk 3, dim_v 6.
struct Args {
  Call<float> call = random_call<float>(geometry(2, 4, 2, 5, 7, 3, 6), 0);
  Tensor<float> out_memory{{2, 4, 5, 6}};
  Tensor<float> dq{{2, 4, 5, 3}}, dk{{2, 2, 7, 3}}, dv{{2, 2, 7, 6}};
  heed::Inputs<float> in = call.inputs();
  heed::Mask<float> mask;
  View out = out_memory.view();
  ConstView grad_out = std::as_const(call.grad_out).view();
  heed::Saved<float> saved;
  heed::Gradients<float> grads{dq.view(), dk.view(), dv.view(), {}, {}};
  heed::Options options = named();

  static heed::Options named() {
    heed::Options options;
    options.name = "sdpa";
    return options;
  }
  void forward() { heed::forward(heed::ScaledDot<float>{}, in, mask, out, &saved, options); }
  void backward() {
    heed::backward(heed::ScaledDot<float>{}, in, mask, saved, ConstView(out), grad_out, grads,
                   static_cast<heed::ScaledDot<float>*>(nullptr), options);
  }
};

struct Refusal {
  const char* what;
  std::function<void(Args&)> spoil;
  std::vector<std::string> words;  // all in the message
};

template <class F>
[[nodiscard]] std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

void check_words(const std::string& message, const std::vector<std::string>& words) {
  INFO("message: " << message);
  for (const std::string& word : words) {
    INFO("wanted: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

ConstView moved(const ConstView& view, const Shape& shape) { return {view.data(), shape}; }

// One sentence: both doors check inputs and mask alike.
const Refusal kInputRefusals[] = {
    {"dim_qk",
     [](Args& a) {
       a.in.key = moved(a.in.key.plain(), {2, 2, 7, 5});
     },
     {"key", "5", "3"}},
    {"batch of the key",
     [](Args& a) {
       a.in.key = moved(a.in.key.plain(), {1, 2, 7, 3});
     },
     {"key has batch 1", "query has 2"}},
    {"batch of the value",
     [](Args& a) {
       a.in.value = moved(a.in.value.plain(), {1, 2, 7, 6});
     },
     {"value has batch 1", "2"}},
    {"heads of the value",
     [](Args& a) {
       a.in.value = moved(a.in.value.plain(), {2, 1, 7, 6});
     },
     {"value has 1 heads", "key has 2"}},
    {"len of the value",
     [](Args& a) {
       a.in.value = moved(a.in.value.plain(), {2, 2, 6, 6});
     },
     {"value has len 6", "key has 7"}},
    {"heads in groups",
     [](Args& a) {
       a.in.query = moved(a.in.query.plain(), {2, 3, 5, 3});
     },
     {"3 heads", "2 kv_heads"}},
    {"no kv_heads",
     [](Args& a) {
       a.in.key = moved(a.in.key.plain(), {2, 0, 7, 3});
       a.in.value = moved(a.in.value.plain(), {2, 0, 7, 6});
     },
     {"4 heads", "0 kv_heads"}},
    {"dim_qk 0",
     [](Args& a) {
       a.in.query = moved(a.in.query.plain(), {2, 4, 5, 0});
       a.in.key = moved(a.in.key.plain(), {2, 2, 7, 0});
     },
     {"query", "dim_qk 0", "at least 1"}},
    {"no value", [](Args& a) { a.in.value = {}; }, {"value was not given"}},
    {"a scale that is no number",
     [](Args& a) { a.options.scale = std::nan(""); },
     {"scale is nan"}},
    {"a scale that floats do not hold",
     [](Args& a) { a.options.scale = 1e300; },
     {"scale is 1e+300"}},
    {"a slope that is no number",
     [](Args& a) {
       a.mask = heed::alibi<float>({0.5f, 0.25f, std::nanf(""), 1.0f});
     },
     {"slope nan for head 2"}},
    {"dim_v 0",
     [](Args& a) {
       a.in.value = moved(a.in.value.plain(), {2, 2, 7, 0});
     },
     {"value", "dim_v 0", "at least 1"}},
    {"a negative extent",
     [](Args& a) {
       a.in.key = moved(a.in.key.plain(), {2, 2, -7, 3});
     },
     {"key", "(2,2,-7,3)", "negative"}},
    {"a null query",
     [](Args& a) {
       a.in.query = {nullptr, {2, 4, 5, 3}};
     },
     {"query", "null", "(2,4,5,3)"}},
    {"a null key",
     [](Args& a) {
       a.in.key = {nullptr, {2, 2, 7, 3}};
     },
     {"key", "null", "(2,2,7,3)"}},
    {"a null value",
     [](Args& a) {
       a.in.value = {nullptr, {2, 2, 7, 6}};
     },
     {"value", "null", "(2,2,7,6)"}},
    {"a misaligned pointer",
     [](Args& a) {
       const auto* byte = reinterpret_cast<const char*>(a.in.key.plain().data()) + 1;
       a.in.key = {reinterpret_cast<const float*>(byte), {2, 2, 6, 3}, {42, 21, 3}};
     },
     {"key", "aligned", "4"}},
    {"more elements than an index counts",
     [](Args& a) {
       const Index big = Index(1) << 40;
       a.in.query = moved(a.in.query.plain(), {big, 4, big, 3});
     },
     {"query", "overflows"}},
    {"an extra input that nobody reads",
     [](Args& a) {
       a.in.extra = {a.call.grad_out.view().data(), {2, 4, 5, 6}};
     },
     {"extra", "(2,4,5,6)", "none"}},
    {"too few key lengths",
     [](Args& a) { a.mask = heed::key_lengths<float>({7}); },
     {"key_lengths", "1", "2"}},
    {"a key length beyond the keys",
     [](Args& a) {
       a.mask = heed::key_lengths<float>({7, 8});
     },
     {"key_lengths[1]", "8", "7"}},
    {"a negative key length",
     [](Args& a) {
       a.mask = heed::key_lengths<float>({-1, 3});
     },
     {"key_lengths[0]", "-1", "[0, 7]"}},
    {"a boolean mask of another shape",
     [](Args& a) {
       static const bool all[64] = {};
       a.mask = heed::boolean<float>({all, {1, 1, 5, 8}});
     },
     {"boolean mask", "(1,1,5,8)", "len_kv, 7"}},
    {"a boolean mask of queries alone",
     [](Args& a) {
       static const bool all[5] = {};
       a.mask = heed::boolean<float>({all, {1, 1, 5, 1}});
     },
     {"the boolean mask has shape (1,1,5,1), its last extent must be len_kv, 7: it does not "
      "broadcast over keys"}},
    {"a bias of queries alone",
     [](Args& a) {
       a.mask = heed::bias<float>({a.call.value.view().data(), {1, 1, 5, 1}});
     },
     {"the bias has shape (1,1,5,1), its last extent must be len_kv, 7: it does not broadcast over "
      "keys"}},
    {"a bias of another shape",
     [](Args& a) {
       a.mask = heed::bias<float>({a.call.value.view().data(), {1, 2, 5, 7}});
     },
     {"bias", "(1,2,5,7)", "(2,4,5,7)"}},
    {"a null bias",
     [](Args& a) {
       a.mask = heed::bias<float>({nullptr, {1, 1, 5, 7}});
     },
     {"bias", "null", "(1,1,5,7)"}},
    {"too few query documents",
     [](Args& a) {
       a.mask = heed::documents<float>(std::vector<Index>(9), std::vector<Index>(14));
     },
     {"documents", "9 query", "10"}},
    {"too many key documents",
     [](Args& a) {
       a.mask = heed::documents<float>(std::vector<Index>(10), std::vector<Index>(15));
     },
     {"documents", "15 key", "14"}},
    {"too few slopes",
     [](Args& a) {
       a.mask = heed::alibi<float>({0.5f, 0.25f});
     },
     {"alibi", "2 slopes", "4 heads"}},
    {"a negative number of threads", [](Args& a) { a.options.threads = -2; }, {"threads", "-2"}},
    {"a negative key tile", [](Args& a) { a.options.key_tile = -16; }, {"key_tile", "-16"}},
    {"a panel of too many vectors",
     [](Args& a) { a.options.panel_vectors = heed::kPanelVectors + 1; },
     {"panel_vectors", std::to_string(heed::kPanelVectors + 1),
      std::to_string(heed::kPanelVectors)}},
};

const Refusal kForwardRefusals[] = {
    {"an output of another shape",
     [](Args& a) {
       a.out = {a.out.data(), {2, 4, 5, 5}};
     },
     {"out", "(2,4,5,5)", "(2,4,5,6)"}},
    {"no output", [](Args& a) { a.out = {}; }, {"out", "was not given", "(2,4,5,6)"}},
    {"an output of null",
     [](Args& a) {
       a.out = {nullptr, {2, 4, 5, 6}};
     },
     {"out", "null", "(2,4,5,6)"}},
    {"an output whose rows overlap",
     [](Args& a) {
       a.out = {a.out.data(), {2, 4, 5, 6}, {120, 30, 4}};
     },
     {"out has a stride of 4", "6 numbers"}},
    {"an output with one place for both batches",
     [](Args& a) {
       a.out = {a.out.data(), {2, 4, 5, 6}, {0, 30, 6}};
     },
     {"out has a stride of 0"}},
    {"an output over the bias",
     [](Args& a) {
       a.mask = heed::bias<float>(ConstView(a.out.data(), {1, 1, 5, 7}));
     },
     {"out overlaps bias"}},
    {"an output over the query",
     [](Args& a) {
       a.in.query = {a.out.data() + 10, {2, 4, 5, 3}};
     },
     {"out overlaps query"}},
    {"an output over the key",
     [](Args& a) {
       a.in.key = {a.out.data() + 239, {2, 2, 7, 3}};
     },
     {"out overlaps key"}},
    {"an output over the value",
     [](Args& a) {
       a.in.value = {a.out.data(), {2, 2, 7, 6}};
     },
     {"out overlaps value"}},
};

const Refusal kBackwardRefusals[] = {
    {"an output of another shape",
     [](Args& a) {
       a.out = {a.out.data(), {2, 4, 5, 5}};
     },
     {"out", "(2,4,5,5)", "(2,4,5,6)"}},
    {"a grad_out of another shape",
     [](Args& a) {
       a.grad_out = {a.grad_out.data(), {2, 4, 6, 5}};
     },
     {"grad_out", "(2,4,6,5)", "(2,4,5,6)"}},
    {"a grad_query of another shape",
     [](Args& a) {
       a.grads.query = {a.dq.view().data(), {2, 4, 3, 5}};
     },
     {"grad_query", "(2,4,3,5)", "(2,4,5,3)"}},
    {"a grad_key of another shape",
     [](Args& a) {
       a.grads.key = {a.dk.view().data(), {2, 2, 3, 7}};
     },
     {"grad_key", "(2,2,3,7)", "(2,2,7,3)"}},
    {"a grad_value of another shape",
     [](Args& a) {
       a.grads.value = {a.dv.view().data(), {2, 2, 6, 7}};
     },
     {"grad_value", "(2,2,6,7)", "(2,2,7,6)"}},
    {"a gradient of an input that is not there",
     [](Args& a) {
       a.grads.extra = {a.dv.view().data(), {2, 2, 7, 6}};
     },
     {"grad_extra"}},
    {"a gradient of a bias that is not there",
     [](Args& a) {
       a.grads.bias = {a.dv.view().data(), {1, 1, 5, 7}};
     },
     {"grad_bias"}},
    {"a gradient whose heads share a place",
     [](Args& a) {
       a.grads.query = {a.dq.view().data(), {2, 4, 5, 3}, {60, 0, 3}};
     },
     {"grad_query has a stride of 0", "3 numbers"}},
    {"a gradient over an input",
     [](Args& a) {
       a.grads.key = {const_cast<float*>(a.in.key.plain().data()), {2, 2, 7, 3}};
     },
     {"grad_key overlaps key"}},
    {"a gradient over grad_out",
     [](Args& a) {
       a.grads.query = {const_cast<float*>(a.grad_out.data()), {2, 4, 5, 3}};
     },
     {"grad_query overlaps grad_out"}},
    {"a gradient over the output",
     [](Args& a) {
       a.grads.value = {a.out.data(), {2, 2, 7, 6}};
     },
     {"grad_value overlaps out"}},
    {"one memory for two gradients",
     [](Args& a) {
       a.grads.key = {a.dv.view().data() + 1, {2, 2, 7, 3}};
     },
     {"grad_key overlaps grad_value"}},
    {"saved rows of another call", [](Args& a) { a.saved.lse.resize(12); }, {"saved", "12", "40"}},
    {"saved rows without their softmax state",
     [](Args& a) { a.saved.state.clear(); },
     {"saved", "0", "120"}},
    {"nothing saved", [](Args& a) { a.saved = {}; }, {"saved holds nothing", "forward()"}},
};

}  // namespace

TEST_CASE("both doors refuse inputs, masks and options that do not fit, naming argument and values",
          "[doors]") {
  for (const Refusal& refusal : kInputRefusals) {
    INFO(refusal.what);
    Args args;
    args.forward();
    refusal.spoil(args);
    check_words(message_of([&] { args.forward(); }), refusal.words);
    check_words(message_of([&] { args.backward(); }), refusal.words);
  }
}

TEST_CASE("errors of a door begin with its name and the op's", "[doors]") {
  Args args;
  args.forward();
  args.in.key = moved(args.in.key.plain(), {1, 2, 7, 3});
  CHECK(message_of([&] { args.forward(); }).rfind("heed::forward(sdpa): ", 0) == 0);
  CHECK(message_of([&] { args.backward(); }).rfind("heed::backward(sdpa): ", 0) == 0);
  args.options.name = "";
  CHECK(message_of([&] { args.forward(); }).rfind("heed::forward: ", 0) == 0);
}

TEST_CASE("options that no call may have are refused in the name of the call", "[doors]") {
  Args args;
  args.forward();
  const auto said = [&](const std::string& sentence) {
    CHECK(message_of([&] { args.forward(); }) == "heed::forward(sdpa): Options: " + sentence);
    CHECK(message_of([&] { args.backward(); }) == "heed::backward(sdpa): Options: " + sentence);
    CHECK(message_of([&] {
            (void)heed::explain(heed::ScaledDot<float>{}, args.call.geometry, {},
                                heed::Pass::forward, args.options);
          }) == "heed::explain(sdpa): Options: " + sentence);
  };
  args.options.threads = -1;
  said("threads is -1, it must be 0 (default) or positive");
  args.options.threads = 0;
  args.options.key_tile = -16;
  said("key_tile is -16, it must not be negative");
  args.options.key_tile = 0;
  args.options.scale = -1e300;
  said("scale is -1e+300, its size must be at most 3.4028234663852886e+38");
  for (const auto& [scale, text] : {std::pair{std::nan(""), "nan"}, {-HUGE_VAL, "-inf"}}) {
    args.options.scale = scale;
    said("scale is " + std::string(text) + ", it must be finite");
  }
}

TEST_CASE("forward refuses outputs that do not fit or overlap an input", "[doors]") {
  for (const Refusal& refusal : kForwardRefusals) {
    INFO(refusal.what);
    Args args;
    refusal.spoil(args);
    check_words(message_of([&] { args.forward(); }), refusal.words);
  }
}

TEST_CASE("both doors refuse what is written over the scales of int8 rows", "[doors]") {
  std::vector<std::int8_t> numbers(2 * 2 * 7 * 6, 1);
  const auto scaled = [&](float* scales, Index dim) {
    const Shape rows{2, 2, 7, dim}, one{2, 2, 7, 1};
    return heed::ScaledView({numbers.data(), rows}, {scales, one});
  };
  for (const bool in_key : {true, false}) {
    INFO(in_key);
    Args args;
    (in_key ? args.in.key : args.in.value) = scaled(args.out.data() + 200, in_key ? 3 : 6);
    CHECK(message_of([&] { args.forward(); }) ==
          std::string("heed::forward(sdpa): out overlaps the scales of ") +
              (in_key ? "key" : "value"));
  }
  std::vector<float> scales(2 * 2 * 7, 1.0F);
  Args args;
  args.in.key = scaled(scales.data(), 3);
  args.forward();
  args.in.key = scaled(args.dv.view().data() + 3, 3);
  CHECK(message_of([&] { args.backward(); }) ==
        "heed::backward(sdpa): grad_value overlaps the scales of key");
}

TEST_CASE("backward refuses gradients and saved rows that do not fit", "[doors]") {
  for (const Refusal& refusal : kBackwardRefusals) {
    INFO(refusal.what);
    Args args;
    args.forward();
    refusal.spoil(args);
    check_words(message_of([&] { args.backward(); }), refusal.words);
  }
}

TEST_CASE("saved rows of one op are no good for another", "[doors]") {
  const Geometry g = geometry(1, 2, 1, 9, 9, 4, 4);
  const auto list = runners<float, kNeeds>(g);
  // Modes of one type differ in options, which are not saved.
  const auto type_of = [](const std::string& name) {
    for (const char* type : {"dar", "ode"})
      if (name.rfind(type, 0) == 0) return std::string(type);
    return name;
  };
  for (const auto& from : list)
    for (const auto& to : list) {
      Call<float> call = random_call<float>(to.geometry, to.extra_dim);
      const auto mine = forward(to, call);
      const auto theirs = forward(from, random_call<float>(from.geometry, from.extra_dim));
      const bool fits = type_of(to.name) == type_of(from.name);
      Outcome<float> mixed_up{mine.out, theirs.saved};
      INFO(to.name << " with rows saved by " << from.name);
      if (fits)
        CHECK_NOTHROW(backward(to, call, mixed_up));
      else
        CHECK_THROWS_AS(backward(to, call, mixed_up), std::invalid_argument);
    }
}

TEST_CASE("ops that ask for an extra input refuse a call without it", "[doors]") {
  const Geometry g = geometry(2, 2, 1, 5, 5, 4, 4);
  int asked = 0;
  for (const auto& runner : runners<float, kNeeds>(g)) {
    if (runner.extra_dim == 0) continue;
    ++asked;
    INFO(runner.name);
    Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
    Call<float> without = call;
    without.extra = {};
    const std::string shape = call.extra.shape().text();
    check_words(message_of([&] { (void)forward(runner, without); }), {shape, "none was given"});
    without.extra = Tensor<float>({2, 2, 6, runner.extra_dim});
    check_words(message_of([&] { (void)forward(runner, without); }), {shape, "has shape (2,2,6,"});
    Tensor<float> out(call.grad_out.shape());
    heed::Inputs<float> in = call.inputs();
    in.extra = {out.view().data(), call.extra.shape()};
    check_words(message_of([&] { runner.forward(in, {}, out.view(), nullptr, {}); }),
                {"out overlaps extra"});
  }
  CHECK(asked >= 2);
}

TEST_CASE("a gate on the own row needs the keys at the queries' positions", "[doors]") {
  int asked = 0;
  for (const auto& runner : runners<float>(geometry(1, 2, 1, 5, 7, 4, 4))) {
    if (!runner.reads_own_rows) continue;
    ++asked;
    const Call<float> call = random_call<float>(runner.geometry, 0);
    Tensor<float> out(call.grad_out.shape());
    heed::Inputs<float> in = call.inputs();
    in.first_query = 2;
    CHECK_NOTHROW(runner.forward(in, {}, out.view(), nullptr, {}));
    in.first_query = 3;
    check_words(message_of([&] { runner.forward(in, {}, out.view(), nullptr, {}); }),
                {"queries stand at [3, 8), keys [0, 7) of 7 are at hand"});
  }
  CHECK(asked == 1);
}

TEST_CASE("masks refuse to hold two of a kind and parts that make no sense", "[doors]") {
  const auto lengths = heed::key_lengths<float>({1});
  const auto slopes = heed::alibi<float>({1.0f});
  const auto cap = heed::soft_cap<float>(1.0f);
  for (const auto& mask : {lengths, slopes, cap})
    check_words(message_of([&] { (void)(mask & mask); }), {"both sides of &"});
  check_words(message_of([] { (void)heed::soft_cap<float>(0.0f); }), {"soft_cap", "0", "positive"});
  check_words(message_of([] { (void)heed::soft_cap<float>(-2.0f); }), {"soft_cap", "-2"});
  check_words(message_of([] { (void)heed::soft_cap<float>(INFINITY); }),
              {"soft_cap", "inf", "finite"});
  check_words(message_of([] { (void)heed::window<float>(-2, 1); }), {"window", "-2"});
  check_words(message_of([] { (void)heed::window<float>(1, -3); }), {"window", "-3"});
}

// ---- views ---------------------------------------------------------------------------------------

namespace {

// The members of std::mdspan that heed uses.
template <class T, std::size_t Rank>
struct StubSpan {
  T* memory;
  std::array<Index, Rank> extents, strides;
  [[nodiscard]] T* data_handle() const { return memory; }
  [[nodiscard]] Index extent(std::size_t r) const { return extents[r]; }
  [[nodiscard]] Index stride(std::size_t r) const { return strides[r]; }
  [[nodiscard]] static constexpr std::size_t rank() { return Rank; }
};

[[nodiscard]] bool same_place(const ConstView& a, const ConstView& b) {
  return a.data() == b.data() && a.shape() == b.shape() && a.strides().row == b.strides().row &&
         a.strides().head == b.strides().head && a.strides().batch == b.strides().batch;
}

// The result of scaled dot-product attention on any views, written to dense memory.
[[nodiscard]] std::vector<float> attend(const ConstView& q, const ConstView& k,
                                        const ConstView& v) {
  const Shape& s = q.shape();
  std::vector<float> out(std::size_t(s.batch * s.heads * s.len * v.shape().dim));
  heed::forward(heed::ScaledDot<float>{}, {q, k, v, {}}, heed::Mask<float>{},
                View(out.data(), {s.batch, s.heads, s.len, v.shape().dim}));
  return out;
}

}  // namespace

TEST_CASE("row-major Eigen tensors and maps of them are read in place", "[doors]") {
  Eigen::Tensor<float, 4, Eigen::RowMajor> tensor(2, 3, 5, 4);
  const ConstView dense(tensor.data(), {2, 3, 5, 4});
  CHECK(same_place(ConstView(View(tensor)), dense));
  CHECK(same_place(ConstView(std::as_const(tensor)), dense));
  Eigen::TensorMap<Eigen::Tensor<float, 4, Eigen::RowMajor>> map(tensor.data(), 2, 3, 5, 4);
  CHECK(same_place(ConstView(View(map)), dense));
  Eigen::TensorMap<const Eigen::Tensor<float, 4, Eigen::RowMajor>> const_map(tensor.data(), 2, 3, 5,
                                                                             4);
  CHECK(same_place(ConstView(const_map), dense));
}

TEST_CASE("row-major Eigen matrices and maps are one head, read in place", "[doors]") {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Matrix matrix = Matrix::Random(6, 9);
  const ConstView whole(matrix.data(), {1, 1, 6, 9}, {0, 0, 9});
  CHECK(same_place(ConstView(View(matrix)), whole));
  Eigen::Map<Matrix> map(matrix.data(), 6, 9);
  CHECK(same_place(ConstView(View(map)), whole));
  Eigen::Map<const Matrix, 0, Eigen::OuterStride<>> columns(matrix.data() + 2, 6, 4,
                                                            Eigen::OuterStride<>(9));
  CHECK(same_place(ConstView(columns), {matrix.data() + 2, {1, 1, 6, 4}, {0, 0, 9}}));
  Eigen::Map<Matrix, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> every_other(
      matrix.data(), 6, 4, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(9, 2));
  check_words(message_of([&] { (void)View(every_other); }), {"inner stride is 2", "1"});
  // Blocks of products: attention reads them in place.
  const auto out = attend(columns, columns, columns);
  const Matrix copy = columns;
  CHECK(same_bits(out, attend(copy, copy, copy)));
}

TEST_CASE("types with the members of mdspan are read in place", "[doors]") {
  std::vector<float> memory(500, 0.5f);
  const StubSpan<float, 4> span{memory.data(), {2, 3, 5, 4}, {100, 30, 6, 1}};
  CHECK(same_place(ConstView(View(span)), {memory.data(), {2, 3, 5, 4}, {100, 30, 6}}));
  const StubSpan<const float, 2> matrix{memory.data(), {5, 4}, {7, 1}};
  CHECK(same_place(ConstView(matrix), {memory.data(), {1, 1, 5, 4}, {0, 0, 7}}));
  const StubSpan<float, 4> gaps{memory.data(), {2, 3, 5, 4}, {200, 60, 12, 2}};
  check_words(message_of([&] { (void)View(gaps); }), {"last stride is 2", "1"});
}

TEST_CASE("packed QKV and QKVI memory is read in place and its gradient written in place",
          "[doors]") {
  const Index batch = 2, len = 11, heads = 3, dim = 5;
  const Geometry g = geometry(batch, heads, heads, len, len, dim, dim);
  for (const Index parts : {3, 4}) {
    std::vector<float> packed(std::size_t(batch * len * parts * heads * dim)),
        grad(packed.size(), 9);
    const heed::CounterRandom random(kSeed, 5);
    for (std::size_t n = 0; n < packed.size(); ++n) packed[n] = float(random.normal(n));
    const auto part = [&](Index p) {
      return ConstView(heed::view_packed(packed.data(), batch, len, heads, dim, parts, p));
    };
    const auto grad_part = [&](Index p) {
      return heed::view_packed(grad.data(), batch, len, heads, dim, parts, p);
    };
    for (const auto& runner : runners<float, kNeeds>(g)) {
      if (runner.geometry.query_heads != heads || runner.extra_dim != (parts == 4 ? dim : 0))
        continue;
      INFO(runner.name);
      heed::Inputs<float> in{part(0), part(1), part(2), {}};
      if (parts == 4) in.extra = part(3);
      Call<float> dense = random_call<float>(runner.geometry, runner.extra_dim);
      Tensor<float>* copies[] = {&dense.query, &dense.key, &dense.value, &dense.extra};
      for (Index p = 0; p < parts; ++p)
        for (Index b = 0; b < batch; ++b)
          for (Index h = 0; h < heads; ++h)
            for (Index t = 0; t < len; ++t)
              for (Index c = 0; c < dim; ++c) (*copies[p])(b, h, t, c) = part(p)(b, h, t, c);
      const auto wanted = forward(runner, dense);
      Tensor<float> out(dense.grad_out.shape(), Layout::bthd);
      heed::Saved<float> saved;
      runner.forward(in, {}, out.view(), &saved, {});
      CHECK(same_bits(out.dense(), wanted.out.dense()));

      heed::Gradients<float> grads{grad_part(0), grad_part(1), grad_part(2), {}, {}};
      if (parts == 4) grads.extra = grad_part(3);
      (void)runner.backward(in, {}, saved, std::as_const(out).view(),
                            std::as_const(dense.grad_out).view(), grads, {});
      const Named apart = backward(runner, dense, wanted);
      for (Index p = 0; p < parts; ++p) {
        INFO("part " << p);
        std::vector<double> got;
        for (Index b = 0; b < batch; ++b)
          for (Index h = 0; h < heads; ++h)
            for (Index t = 0; t < len; ++t)
              for (Index c = 0; c < dim; ++c) got.push_back(double(grad_part(p)(b, h, t, c)));
        CHECK(same_bits(got, apart[std::size_t(p)].values));
      }
    }
  }
}

TEST_CASE("an output beside its inputs in one packed tensor does not overlap them", "[doors]") {
  const Index batch = 2, len = 6, heads = 2, dim = 4;
  std::vector<float> packed(std::size_t(batch * len * 4 * heads * dim), 0.25f);
  const auto part = [&](Index p) {
    return heed::view_packed(packed.data(), batch, len, heads, dim, 4, p);
  };
  const heed::Inputs<float> in{part(0), part(1), part(2), {}};
  CHECK_NOTHROW(heed::forward(heed::ScaledDot<float>{}, in, heed::Mask<float>{}, part(3)));
  for (const Index p : {0, 1, 2})
    CHECK_THROWS_AS(heed::forward(heed::ScaledDot<float>{}, in, heed::Mask<float>{}, part(p)),
                    std::invalid_argument);
  // One column to the left is the value's last.
  View shifted = part(3);
  shifted = View(shifted.data() - 1, shifted.shape(), shifted.strides());
  CHECK_THROWS_AS(heed::forward(heed::ScaledDot<float>{}, in, heed::Mask<float>{}, shifted),
                  std::invalid_argument);
}

TEST_CASE("view_packed refuses a part that is not there", "[doors]") {
  float x = 0;
  check_words(message_of([&] { (void)heed::view_packed(&x, 1, 1, 1, 1, 3, 3); }),
              {"part is 3", "[0, 3)"});
  check_words(message_of([&] { (void)heed::view_packed(&x, 1, 1, 1, 1, 3, -1); }), {"part is -1"});
}

TEST_CASE("overlap is judged by the bytes that two views touch", "[doors]") {
  std::vector<float> memory(400);
  float* p = memory.data();
  const View a(p, {1, 1, 10, 4});
  const auto overlaps = [&](const View& b) {
    CHECK(heed::may_overlap(a, b) == heed::may_overlap(b, a));
    return heed::may_overlap(a, b);
  };
  CHECK(overlaps(a));
  CHECK(overlaps({p + 39, {1, 1, 1, 4}}));
  CHECK_FALSE(overlaps({p + 40, {1, 1, 1, 4}}));
  CHECK_FALSE(overlaps({p, {1, 1, 0, 4}}));
  // Interleaved rows of one matrix of 8 columns.
  const View left(p, {1, 1, 10, 4}, {0, 0, 8}), right(p + 4, {1, 1, 10, 4}, {0, 0, 8});
  CHECK_FALSE(heed::may_overlap(left, right));
  CHECK(heed::may_overlap(left, View(p + 3, {1, 1, 10, 4}, {0, 0, 8})));
  CHECK(heed::may_overlap(left, View(p + 7, {1, 1, 10, 4}, {0, 0, 8})));
}

// ---- memory --------------------------------------------------------------------------------------

namespace {

// Runs f with the k-th allocation failing, k = 1, 2, ... until it gets through; returns that k.
template <class F>
[[nodiscard]] long count_failures(F&& f) {
  for (long k = 0; k < 10000; ++k) {
    bool failed = false;
    Allocations::until_failure = k;
    try {
      f();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (...) {
      Allocations::until_failure = -1;
      throw;
    }
    const bool reached = Allocations::until_failure < 0;
    Allocations::until_failure = -1;
    REQUIRE(failed == reached);
    if (!failed) return k + 1;
  }
  return -1;
}

}  // namespace

TEST_CASE("when the k-th allocation fails the caller gets bad_alloc and untouched inputs",
          "[doors]") {
  for (const int threads : {1, 3})
    for (const auto& runner : runners<float, kNeeds>(geometry(2, 2, 1, 35, 35, 4, 4))) {
      INFO(runner.name << " on " << threads << " threads");
      Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
      call.options = small_tiles(threads);
      call.mask = random_bias<float>({1, 2, 35, 35}, 4);
      const Call<float> before = call;
      const auto wanted = forward(runner, call);
      const Named wanted_grads = backward(runner, call, wanted);
      Outcome<float> result{Tensor<float>(call.grad_out.shape()), {}};
      Tensor<float> dq(call.query.shape()), dk(call.key.shape()), dv(call.value.shape());
      const heed::Inputs<float> in = call.inputs();

      const long forward_failures = count_failures([&] {
        heed::Saved<float> saved;
        runner.forward(in, call.mask.mask, result.out.view(), &saved, call.options);
        result.saved = std::move(saved);
      });
      CHECK(forward_failures > 3);
      CHECK(same_bits(result.out.dense(), wanted.out.dense()));
      const long backward_failures = count_failures([&] {
        (void)runner.backward(in, call.mask.mask, result.saved, std::as_const(result.out).view(),
                              std::as_const(call.grad_out).view(),
                              {dq.view(), dk.view(), dv.view(), {}, {}}, call.options);
      });
      CHECK(backward_failures > 3);
      CHECK(same_bits(dq.dense<double>(), wanted_grads[0].values));
      CHECK(same_bits(dk.dense<double>(), wanted_grads[1].values));

      CHECK(same_bits(call.query.memory(), before.query.memory()));
      CHECK(same_bits(call.key.memory(), before.key.memory()));
      CHECK(same_bits(call.value.memory(), before.value.memory()));
      CHECK(same_bits(call.extra.memory(), before.extra.memory()));
      CHECK(same_bits(call.grad_out.memory(), before.grad_out.memory()));
    }
}
