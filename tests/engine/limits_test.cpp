// SPDX-License-Identifier: Apache-2.0
// Calls at the limits: nothing to do, the largest numbers, the longest tensors, and rows as far
// apart as possible. Every variant, forward and backward.

#include "catch.hpp"
#include "conformance/runner.hpp"

#include <sys/mman.h>

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true};

// Calls f(runner, call) for every variant that can run on `g`.
template <class T, class F>
void for_calls(const Geometry& g, F&& f) {
  for (const Runner<T>& runner : all_runners<T, kNeeds>(g)) {
    INFO(runner.name << " in " << (sizeof(T) == 4 ? "float" : "double") << ", "
                     << describe(runner.geometry));
    Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
    f(runner, call);
  }
}

[[nodiscard]] bool all_zero(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return v == 0; });
}
[[nodiscard]] bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}
[[nodiscard]] const std::vector<double>& gradient(const Named& all, const char* name) {
  for (const auto& tensor : all)
    if (tensor.name == name) return tensor.values;
  FAIL("there is no gradient of " << name);
  return all[0].values;
}

}  // namespace

TEMPLATE_TEST_CASE(
    "calls without batch, heads, queries or keys have empty results and a bias gradient of 0",
    "[limits]", float, double) {
  using T = TestType;
  const Geometry empty[] = {{0, 4, 4, 2, 5, 5, 4, 4}, {2, 0, 0, 2, 5, 5, 4, 4},
                            {2, 0, 0, 0, 5, 5, 4, 4}, {2, 4, 4, 2, 0, 0, 4, 4},
                            {2, 4, 4, 2, 0, 5, 4, 4}, {2, 4, 4, 2, 5, 0, 4, 4},
                            {0, 0, 0, 0, 0, 0, 4, 4}};
  for (const Geometry& g : empty)
    for (const int threads : {1, 3})
      for_calls<T>(g, [&](const auto& runner, auto& call) {
        // Memory for all empty tensors, so that they have addresses where the call has no numbers.
        for (const Shape& shape :
             {Shape{1, 1, 1, g.len_kv}, Shape{1, 1, g.len_q, g.len_kv},
              Shape{g.batch, 1, 1, g.len_kv}, Shape{g.batch, g.heads, g.len_q, g.len_kv}}) {
          INFO("bias " << shape.text() << ", " << threads << " threads");
          call.mask = random_bias<T>(shape, 3);
          call.options.threads = threads;
          const auto result = forward(runner, call);
          CHECK(Index(result.saved.lse.size()) == runner.maps * g.query_rows());
          for (const T lse : result.saved.lse) CHECK(lse == -std::numeric_limits<T>::infinity());
          const Named grads = backward(runner, call, result);
          for (const auto& tensor : grads) {
            INFO(tensor.name);
            if (tensor.name == "bias" || tensor.name == "key" || tensor.name == "value")
              CHECK(all_zero(tensor.values));
            CHECK(all_finite(tensor.values));
          }
        }
      });
}

TEMPLATE_TEST_CASE(
    "a bias of NaN, infinity or any size at a pair that another mask hides has no effect and no "
    "gradient",
    "[limits]", float, double) {
  using T = TestType;
  const T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const auto hide = [](const char* by, const Geometry& g) {
    const std::string mask = by;
    if (mask == "causal") return owned(heed::causal<T>());
    if (mask == "window") return owned(heed::window<T>(2, 1));
    if (mask == "key lengths") return owned(heed::key_lengths<T>({g.len_kv - 9, 3}));
    if (mask == "documents") return random_documents<T>(g);
    return random_boolean<T>({g.batch, g.heads, g.len_q, g.len_kv}, 8);
  };
  for (const auto& [len_q, len_kv] : {std::pair<Index, Index>{20, 20}, {1, 20}})
    for (const char* by : {"causal", "window", "key lengths", "documents", "boolean"})
      for_calls<T>(geometry(2, 4, 2, len_q, len_kv, 4, 4), [&](const auto& runner, auto& call) {
        INFO("hidden by " << by);
        const Geometry& g = call.geometry;
        const OwnedMask<T> hiding = hide(by, g);
        const heed::BoundMask<T> bound(hiding.mask, g, "test");
        OwnedMask<T> bias = random_bias<T>({g.batch, g.heads, g.len_q, g.len_kv}, 3);
        call.mask = hiding & bias;
        const auto clean = forward(runner, call);
        const Named clean_grads = backward(runner, call, clean);
        for (const T garbage : {nan, infinity, -infinity, std::numeric_limits<T>::max()}) {
          INFO("bias " << garbage);
          for (Index b = 0; b < g.batch; ++b)
            for (Index h = 0; h < g.heads; ++h)
              for (Index i = 0; i < g.len_q; ++i)
                for (Index j = 0; j < g.len_kv; ++j)
                  if (!bound.visible(b, h, i, j)) (*bias.bias)(b, h, i, j) = garbage;
          const auto result = forward(runner, call);
          CHECK(same_bits(result.out.dense(), clean.out.dense()));
          CHECK(same_bits(result.saved.lse, clean.saved.lse));
          const Named grads = backward(runner, call, result);
          for (std::size_t t = 0; t < grads.size(); ++t) {
            INFO("gradient of " << grads[t].name);
            CHECK(same_bits(grads[t].values, clean_grads[t].values));
          }
          const std::vector<double>& dbias = gradient(grads, "bias");
          std::size_t n = 0;
          for (Index b = 0; b < g.batch; ++b)
            for (Index h = 0; h < g.heads; ++h)
              for (Index i = 0; i < g.len_q; ++i)
                for (Index j = 0; j < g.len_kv; ++j, ++n)
                  if (!bound.visible(b, h, i, j) && dbias[n] != 0)
                    FAIL("gradient " << dbias[n] << " at " << n);
        }
      });
}

TEMPLATE_TEST_CASE(
    "a shift of all scores of a row by 1e30, up or down, gives the same bits, finite and even "
    "weights",
    "[limits]", float, double) {
  using T = TestType;
  // 1e30 exceeds all logits so far that none counts: every visible key has the same weight.
  for (const auto& [len_q, len_kv] : {std::pair<Index, Index>{20, 20}, {1, 20}})
    for (const bool causal : {false, true})
      for_calls<T>(geometry(2, 4, 2, len_q, len_kv, 4, 4), [&](const auto& runner, auto& call) {
        const auto run = [&](T shift) {
          OwnedMask<T> bias = random_bias<T>({1, 1, call.geometry.len_q, call.geometry.len_kv}, 3);
          bias.bias->fill(shift);
          call.mask =
              bias & (causal ? owned(heed::causal<T>(heed::Align::bottom_right)) : OwnedMask<T>{});
          return forward(runner, call);
        };
        const auto up = run(T(1e30));
        const Named up_grads = backward(runner, call, up);
        const auto down = run(T(-1e30));
        const Named down_grads = backward(runner, call, down);
        CHECK(all_finite(up.out.template dense<double>()));
        for (const auto& tensor : up_grads) CHECK(all_finite(tensor.values));
        for (const auto& tensor : down_grads) CHECK(all_finite(tensor.values));
        CHECK(same_bits(up.out.dense(), down.out.dense()));
        if (runner.name != "sdpa") return;
        const Index queries = call.geometry.len_q, keys = call.geometry.len_kv;
        for (Index c = 0; c < 4; ++c) {
          double mean = 0;  // mean of all keys, which the last query sees
          for (Index j = 0; j < keys; ++j) mean += double(call.value(1, 1, j, c)) / double(keys);
          CHECK(double(up.out(1, 3, queries - 1, c)) == Approx(mean).margin(1e-6));
        }
      });
}

TEST_CASE(
    "backward of 65,536 tokens agrees with backward of their last thousand, for every variant",
    "[limits]") {
  // Under a window, gradients near the end depend on nothing that is far away.
  constexpr Index kLong = 65536, kShort = 1000, kWindow = 150, kWidth = 8;
  const std::vector<Runner<float>> all =
      all_runners<float, kNeeds>(geometry(1, 1, 1, kLong, kLong, kWidth, kWidth));
  const std::vector<Runner<float>> tails =
      all_runners<float, kNeeds>(geometry(1, 1, 1, kShort, kShort, kWidth, kWidth));
  for (std::size_t n = 0; n < all.size(); ++n) {
    INFO(all[n].name);
    Call<float> whole = random_call<float>(all[n].geometry, all[n].extra_dim);
    Call<float> tail = random_call<float>(tails[n].geometry, tails[n].extra_dim);
    whole.options.threads = 0;
    whole.mask = tail.mask = owned(heed::window<float>(kWindow, 0));
    const auto copy = [](const Tensor<float>& from, Tensor<float>& to) {
      const Shape s = to.shape();
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          for (Index c = 0; c < s.dim; ++c) to(0, h, t, c) = from(0, h, kLong - kShort + t, c);
    };
    copy(whole.query, tail.query), copy(whole.key, tail.key), copy(whole.value, tail.value);
    copy(whole.grad_out, tail.grad_out);
    if (whole.extra.given()) copy(whole.extra, tail.extra);
    const Named far = backward(all[n], whole, forward(all[n], whole));
    const Named near = backward(tails[n], tail, forward(tails[n], tail));
    const auto compare = [&](const char* name, const Tensor<float>& like) {
      INFO("gradient of " << name);
      const std::vector<double>&a = gradient(far, name), &b = gradient(near, name);
      CHECK(all_finite(a));
      const Shape& s = like.shape();
      double worst = 0;
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = kShort - 500; t < kShort; ++t)
          for (Index c = 0; c < s.dim; ++c) {
            const double x = a[std::size_t(((h + 1) * kLong - kShort + t) * s.dim + c)];
            const double y = b[std::size_t((h * kShort + t) * s.dim + c)];
            worst = std::max(worst, std::abs(x - y));
          }
      CHECK(worst <= 1e-5 * std::max(1.0, largest(b)));
    };
    compare("query", tail.query);
    compare("key", tail.key);
    compare("value", tail.value);
  }
}

namespace {

// Tensors whose rows or batches lie so far apart that offsets exceed 2^31, each in address space of its own that is not
// there until it is touched.
class FarMemory {
 public:
  explicit FarMemory(bool far_batches) : far_batches_(far_batches) {}
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;
  ~FarMemory() {
    for (float* piece : pieces_) munmap(piece, kBytes);
  }

  // The same numbers, far apart.
  [[nodiscard]] heed::TensorView<float> copy_of(const Tensor<float>& x) {
    if (!x.given()) return {};
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) FAIL("mmap gives no " << kBytes << " bytes of address space");
    pieces_.push_back(static_cast<float*>(at));
    const Shape& s = x.shape();
    const heed::Strides strides = far_batches_ ? heed::Strides{kFar + 64, s.dim, s.dim * s.heads}
                                               : heed::Strides{s.heads * s.dim, s.dim, kFar / 20};
    const heed::TensorView<float> far(pieces_.back(), s, strides);
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          std::copy_n(x.view().row(b, h, t), s.dim, far.row(b, h, t));
    return far;
  }

 private:
  static constexpr Index kFar = Index(1) << 31;
  static constexpr std::size_t kBytes = 5 * std::size_t(kFar) / 2 * sizeof(float);

  bool far_batches_;
  std::vector<float*> pieces_;
};

[[nodiscard]] std::vector<float> dense(const heed::TensorView<float>& x) {
  std::vector<float> numbers;
  const Shape& s = x.shape();
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        numbers.insert(numbers.end(), x.row(b, h, t), x.row(b, h, t) + s.dim);
  return numbers;
}

}  // namespace

TEST_CASE(
    "tensors and biases whose offsets exceed 2^31 give the bits of dense ones, forward and "
    "backward",
    "[limits]") {
  for (const bool far_batches : {false, true})
    for (const Index len_q : {41, 1}) {
      const Index len_kv = 41;
      for_calls<float>(geometry(2, 4, 2, len_q, len_kv, 8, 8), [&](const auto& runner, auto& call) {
        INFO((far_batches ? "far batches" : "far rows"));
        FarMemory memory(far_batches);
        call.mask = owned(heed::causal<float>(heed::Align::bottom_right)) &
                    random_bias<float>({2, 4, len_q, len_kv}, 3, 0.1);
        const auto clean = forward(runner, call);
        const Named clean_grads = backward(runner, call, clean);
        const auto far = [&](const Tensor<float>& x) { return memory.copy_of(x); };
        const heed::Inputs<float> in{far(call.query), far(call.key), far(call.value),
                                     far(call.extra)};
        heed::Mask<float> mask = call.mask.mask;
        mask.bias = far(*call.mask.bias);
        const heed::TensorView<float> out = far(call.grad_out), grad_out = far(call.grad_out);
        const heed::TensorView<float> grads[] = {far(call.query), far(call.key), far(call.value),
                                                 far(call.extra), far(*call.mask.bias)};
        heed::Saved<float> saved;
        runner.forward(in, mask, out, &saved, call.options);
        CHECK(same_bits(dense(out), clean.out.dense()));
        const Named params =
            runner.backward(in, mask, saved, out, grad_out,
                            {grads[0], grads[1], grads[2], grads[3], grads[4]}, call.options);
        std::size_t t = 0;
        for (const auto& view : grads)
          if (view.given()) {
            const std::vector<float> numbers = dense(view);
            INFO("gradient of " << clean_grads[t].name);
            CHECK(same_bits(std::vector<double>(numbers.begin(), numbers.end()),
                            clean_grads[t++].values));
          }
        for (const auto& param : params) {
          INFO("gradient of " << param.name);
          CHECK(same_bits(param.values, clean_grads[t++].values));
        }
      });
    }
}
