// SPDX-License-Identifier: Apache-2.0
// The traps that the prototype of the engine fell into, one test each.

#include "conformance/compare.hpp"
#include "conformance/counting_new.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// A mask under the name that a failing test prints.
struct Hiding {
  const char* name;
  OwnedMask<float> mask;
};

template <class F>
void for_calls(const Geometry& g, F&& f) {
  for (const Runner<float>& runner : runners<float, kNeeds>(g)) {
    INFO(runner.name);
    Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
    call.options = small_tiles();
    f(runner, call);
  }
}

template <class T>
[[nodiscard]] std::vector<T> row(const Tensor<T>& x, Index b, Index h, Index t) {
  const T* first = x.view().row(b, h, t);
  return {first, first + x.shape().dim};
}

[[nodiscard]] bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}

// One variant alone, with its parameters unchanged.
template <class Op>
[[nodiscard]] Tensor<typename Op::Scalar> run(const Op& op, const Call<typename Op::Scalar>& call) {
  using T = typename Op::Scalar;
  Tensor<T> out(call.grad_out.shape());
  heed::forward(op, call.inputs(), call.mask.mask, out.view(),
                static_cast<heed::Saved<T>*>(nullptr), call.options);
  return out;
}

}  // namespace

TEST_CASE("NaN in a hidden value row does not spoil visible outputs of a partial tile", "[traps]") {
  // The diagonal tile of a causal mask holds rows that see key 20 and rows that do not.
  for_calls(geometry(1, 1, 1, 33, 33, 4, 4), [](const auto& runner, auto& call) {
    call.mask = owned(heed::causal<float>());
    const auto clean = forward(runner, call);
    for (const float garbage : {kNan, kInf}) {
      for (Index c = 0; c < 4; ++c) call.value(0, 0, 20, c) = garbage;
      const auto result = forward(runner, call);
      for (Index i = 0; i < 33; ++i) {
        INFO("row " << i);
        const auto got = row(result.out, 0, 0, i), wanted = row(clean.out, 0, 0, i);
        if (i < 20)
          CHECK(same_bits(got, wanted));
        else
          CHECK_FALSE(same_bits(got, wanted));
      }
    }
  });
}

TEST_CASE("no bit of a row depends on the other rows of its panel", "[traps]") {
  // Rows around row 5 become tiny, ordinary, huge and NaN: a choice made by looking across the lanes (a
  // switch for small logits, a series of adaptive length, a moved reference) would show in row 5.
  const Index at = 5;
  for (const bool small : {true, false})
    for_calls(geometry(1, 2, 1, 30, 30, 4, 4), [&](const auto& runner, auto& call) {
      if (!small) call.options = {.threads = 1};
      const auto clean = forward(runner, call);
      const Named clean_grads = backward(runner, call, clean);
      for (const float factor : {0.0f, 1e-6f, 30.0f, 1e4f, 1e10f, kNan}) {
        INFO("other rows times " << factor);
        Call<float> other = call;
        for (Index h = 0; h < call.query.shape().heads; ++h)
          for (Index i = 0; i < 30; ++i)
            for (Index c = 0; c < call.query.shape().dim; ++c)
              if (i != at) other.query(0, h, i, c) *= factor;
        const auto result = forward(runner, other);
        for (Index h = 0; h < 2; ++h) {
          CHECK(same_bits(row(result.out, 0, h, at), row(clean.out, 0, h, at)));
          CHECK(result.saved.lse[std::size_t(h * 30 + at)] ==
                clean.saved.lse[std::size_t(h * 30 + at)]);
        }
        const Named grads = backward(runner, other, result);
        const Index d = call.query.shape().dim;
        for (Index n = at * d; n < (at + 1) * d; ++n)
          CHECK(grads[0].values[std::size_t(n)] == clean_grads[0].values[std::size_t(n)]);
      }
    });
}

TEST_CASE("a resonance strength of 100 gives numbers", "[traps]") {
  Call<float> call = random_call<float>(geometry(1, 2, 1, 40, 40, 8, 8), 0);
  for (const float strength : {100.0f, -100.0f, 1e4f}) {
    heed::Dar<float> op;
    op.score.strength = heed::Param<float>(strength);
    for (const auto& mask : {OwnedMask<float>{}, owned(heed::causal<float>())}) {
      call.mask = mask;
      call.options = small_tiles();
      const auto out = run(op, call).dense<double>();
      CHECK(all_finite(out));
      CHECK(largest(out) <= largest(call.value.dense<double>()) * 1.001);
      const auto exact = heed::reference::forward(heed::reference::cast_whole_op<double>(op),
                                                  heed_test::detail::problem_of<double>(call));
      for (std::size_t n = 0; n < out.size(); ++n)
        CHECK(out[n] == Approx(exact.out[n]).margin(1e-6 * (16 + std::abs(double(strength)))));
    }
  }
}

TEST_CASE("a huge hidden key does not take the maximum's place", "[traps]") {
  // Keys from 29 on are hidden pair by pair, in tiles that hold visible ones, so that they are scored. (Key lengths
  // would cut them off before.)
  const auto early = [](Index, Index, Index, Index j) { return j < 29; };
  const Hiding hidings[] = {
      {"boolean", boolean_mask<float>({1, 1, 33, 33}, early)},
      {"boolean per key", boolean_mask<float>({1, 1, 1, 33}, early)},
      {"causal", owned(heed::causal<float>())},
      {"documents", owned(heed::documents<float>(std::vector<Index>(33, 1), [] {
         std::vector<Index> keys(33, 1);
         std::fill(keys.begin() + 29, keys.end(), 2);
         return keys;
       }()))}};
  for (const Hiding& hiding : hidings)
    for_calls(geometry(1, 2, 1, 33, 33, 4, 4), [&](const auto& runner, auto& call) {
      if (runner.reads_own_rows) return;  // a gate sees the key
      INFO("mask: " << hiding.name);
      call.mask = hiding.mask;
      const auto clean = forward(runner, call);
      for (const float huge : {1e18f, 1e30f, 3e38f, kInf}) {
        for (Index j = 29; j < 33; ++j)
          for (Index c = 0; c < call.key.shape().dim; ++c) call.key(0, 0, j, c) = huge;
        const auto result = forward(runner, call);
        for (Index h = 0; h < 2; ++h)  // under the causal mask the last rows see those keys
          for (Index i = 0; i < 29; ++i)
            CHECK(same_bits(row(result.out, 0, h, i), row(clean.out, 0, h, i)));
      }
    });
}

TEST_CASE("the first step of the resonant flow is the softmax of eta times the drive", "[traps]") {
  const double eta = 0.37, scale = 0.8;
  Call<double> call = random_call<double>(geometry(1, 2, 1, 21, 21, 6, 6), 0);
  heed::ResonantOde<double> flow;
  flow.normaliser.steps = 1;
  flow.normaliser.eta = heed::Param<double>(eta);
  flow.score.rho = heed::Param<double>(0.0);
  call.options.scale = scale;
  const auto one_step = run(flow, call).dense();
  call.options.scale = eta * scale;
  const auto tempered = run(heed::ScaledDot<double>{}, call).dense();
  call.options.scale = scale;
  const auto untempered = run(heed::ScaledDot<double>{}, call).dense();
  double apart = 0;
  for (std::size_t n = 0; n < one_step.size(); ++n) {
    CHECK(one_step[n] == Approx(tempered[n]).margin(1e-13));
    apart = std::max(apart, std::abs(one_step[n] - untempered[n]));
  }
  CHECK(apart > 0.1);
}

TEMPLATE_TEST_CASE("backward of 65,536 tokens allocates a few megabytes", "[traps]",
                   heed::ScaledDot<float>, heed::Dar<float>) {
  const Index len = 65536, dim = 4;
  const Geometry g = geometry(1, 1, 1, len, len, dim, dim);
  Call<float> call = random_call<float>(g, 0);
  call.mask = owned(heed::window<float>(8, 0));
  call.options.threads = 2;
  const TestType op;
  Tensor<float> out(call.grad_out.shape()), dq(call.query.shape()), dk(call.key.shape()),
      dv(call.value.shape());
  heed::Saved<float> saved;
  heed::forward(op, call.inputs(), call.mask.mask, out.view(), &saved, call.options);
  TestType grad;
  const long before = Allocations::bytes;
  heed::backward(op, call.inputs(), call.mask.mask, saved, std::as_const(out).view(),
                 std::as_const(call.grad_out).view(), {dq.view(), dk.view(), dv.view(), {}, {}},
                 &grad, call.options);
  const long bytes = Allocations::bytes - before;
  // One dQ is 1 MiB here; ceil(len / 1024) of them would be 64.
  INFO(bytes << " bytes");
  CHECK(bytes < 8 * 1024 * 1024);
  CHECK(all_finite(dk.dense<double>()));
}

TEST_CASE("gradients of a shared key-value head are the sums over its query heads", "[traps]") {
  const Geometry g = geometry(2, 4, 2, 19, 19, 4, 4);
  const auto shared = runners<float, kNeeds>(g);
  const auto apart = runners<float, kNeeds>(geometry(2, 4, 4, 19, 19, 4, 4));
  REQUIRE(shared.size() == apart.size());
  for (std::size_t r = 0; r < shared.size(); ++r) {
    INFO(shared[r].name);
    Call<float> few = random_call<float>(shared[r].geometry, shared[r].extra_dim);
    Call<float> many = random_call<float>(apart[r].geometry, apart[r].extra_dim);
    few.options = many.options = small_tiles();
    few.mask = many.mask = owned(heed::causal<float>());
    for (Index b = 0; b < 2; ++b)
      for (Index h = 0; h < 4; ++h)
        for (Index j = 0; j < 19; ++j) {
          for (Index c = 0; c < few.key.shape().dim; ++c)
            many.key(b, h, j, c) = few.key(b, h / 2, j, c);
          for (Index c = 0; c < 4; ++c) many.value(b, h, j, c) = few.value(b, h / 2, j, c);
        }
    const auto a = forward(shared[r], few), b = forward(apart[r], many);
    CHECK(same_bits(a.out.dense(), b.out.dense()));
    const Named sum = backward(shared[r], few, a), parts = backward(apart[r], many, b);
    CHECK(same_bits(sum[0].values, parts[0].values));
    for (const std::size_t t : {std::size_t(1), std::size_t(2)}) {
      INFO("gradient of " << sum[t].name);
      const std::size_t head = 19 * std::size_t(t == 1 ? few.key.shape().dim : 4);
      Distance distance;
      const double allowed = 64 * tolerance::eps<float> * std::max(1.0, largest(sum[t].values));
      for (std::size_t n = 0; n < sum[t].values.size(); ++n) {
        const std::size_t first = 2 * (n / head) * head + n % head;
        distance.note(n, sum[t].values[n], parts[t].values[first] + parts[t].values[first + head],
                      allowed);
      }
      INFO(distance.text());
      CHECK(distance.within());
    }
  }
}

TEST_CASE("a row with lse -infinity has finite gradients in backward", "[traps]") {
  for_calls(geometry(1, 2, 1, 20, 20, 4, 4), [](const auto& runner, auto& call) {
    call.mask = owned(heed::causal<float>(heed::Align::top_left, -2));  // rows 0 and 1 see nothing
    const auto result = forward(runner, call);
    CHECK(result.saved.lse[0] == -kInf);
    CHECK(result.saved.lse[1] == -kInf);
    CHECK(std::isfinite(result.saved.lse[2]));
    for (const auto& tensor : backward(runner, call, result)) {
      INFO("gradient of " << tensor.name);
      CHECK(all_finite(tensor.values));
    }
  });
}

TEST_CASE("tiles that a bias of -infinity hides leave -infinity minus -infinity out of the sums",
          "[traps]") {
  // The first tiles are hidden by the bias, which no tile classification sees; then visible keys come.
  // In head 1 the visible keys come first.
  for_calls(geometry(1, 2, 1, 33, 50, 4, 4), [](const auto& runner, auto& call) {
    OwnedMask<float> mask = random_bias<float>({1, 2, 33, 50}, 3);
    const auto boolean = boolean_mask<float>({1, 2, 33, 50}, [](Index, Index h, Index i, Index j) {
      return i % 4 == 0 || (h == 0 ? j >= 35 : j < 9);
    });
    for (Index h = 0; h < 2; ++h)
      for (Index i = 0; i < 33; ++i)
        for (Index j = 0; j < 50; ++j)
          if (!(i % 4 == 0 || (h == 0 ? j >= 35 : j < 9))) (*mask.bias)(0, h, i, j) = -kInf;
    call.mask = mask;
    const auto by_bias = forward(runner, call);
    // The same pairs hidden by a boolean mask instead: the finite part of the bias stays.
    for (Index h = 0; h < 2; ++h)
      for (Index i = 0; i < 33; ++i)
        for (Index j = 0; j < 50; ++j)
          if (std::isinf((*mask.bias)(0, h, i, j))) (*mask.bias)(0, h, i, j) = 0;
    call.mask = mask & boolean;
    const auto by_boolean = forward(runner, call);
    const auto a = by_bias.out.template dense<double>(),
               b = by_boolean.out.template dense<double>();
    CHECK(all_finite(a));
    for (std::size_t n = 0; n < a.size(); ++n) CHECK(a[n] == Approx(b[n]).margin(1e-5));
  });
}

TEST_CASE("an infinite logit of a hidden pair is never multiplied by 0", "[traps]") {
  // Hidden keys of 3e38 give infinite logits, and infinite minus infinite ones. Every query's panel scores them, but
  // for those that the causal mask leaves out with their whole tile.
  const auto early = [](Index, Index, Index, Index j) { return j < 20; };
  const Hiding hidings[] = {{"boolean", boolean_mask<float>({1, 1, 20, 33}, early)},
                            {"boolean per key", boolean_mask<float>({1, 1, 1, 33}, early)},
                            {"causal", owned(heed::causal<float>())}};
  for (const Hiding& hiding : hidings)
    for (const bool capped : {true, false})
      for_calls(geometry(1, 2, 1, 20, 33, 4, 4), [&](const auto& runner, auto& call) {
        INFO("mask: " << hiding.name << (capped ? ", soft cap" : ""));
        call.mask = capped ? hiding.mask & owned(heed::soft_cap<float>(5.0f)) : hiding.mask;
        const auto clean = forward(runner, call);
        const Named clean_grads = backward(runner, call, clean);
        for (Index j = 20; j < 33; ++j)
          for (Index c = 0; c < call.key.shape().dim; ++c) {
            call.key(0, 0, j, c) = c % 2 == 0 ? 3e38f : kInf;
            if (c < 4) call.value(0, 0, j, c) = kInf;
          }
        const auto result = forward(runner, call);
        CHECK(same_bits(result.out.dense(), clean.out.dense()));
        const Named grads = backward(runner, call, result);
        for (std::size_t t = 0; t < grads.size(); ++t) {
          INFO("gradient of " << grads[t].name);
          CHECK(same_bits(grads[t].values, clean_grads[t].values));
        }
      });
}
