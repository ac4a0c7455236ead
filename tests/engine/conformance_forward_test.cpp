// SPDX-License-Identifier: Apache-2.0
// Forward of every variant against its reference, over shapes, layouts, scales and masks.

#include "conformance/compare.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.twin = true, .naive = true};

// f(runner, call) for every variant that can run on `g`.
template <class T, class F>
void for_calls(const Geometry& g, F&& f, std::uint64_t seed = 1, Layout layout = Layout::dense,
               bool per_head = true) {
  for (const Runner<T>& runner : all_runners<T, kNeeds>(g, per_head)) {
    Call<T> call = random_call<T>(runner.geometry, runner.extra_dim, seed, layout);
    f(runner, call);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("forward agrees with the slow twin at every pair of lengths", "[conformance]",
                   float, double) {
  static_assert(std::size(kLengths) >= 40);
  std::uint64_t seed = 0;
  for (const auto& [len_q, len_kv] : kLengths)
    for_calls<TestType>(
        geometry(1, 2, 1, len_q, len_kv, 8, 8),
        [](const auto& runner, auto& call) { check_forward_in_tiles(runner, call); }, ++seed);
}

TEMPLATE_TEST_CASE("forward agrees with the slow twin for every head width", "[conformance]", float,
                   double) {
  for (const Index dim : kDims)
    for_calls<TestType>(
        geometry(2, 2, 2, 19, 19, dim, dim),
        [](const auto& runner, auto& call) { check_forward_in_tiles(runner, call); },
        std::uint64_t(dim));
}

TEMPLATE_TEST_CASE("values may be narrower or wider than keys", "[conformance]", float, double) {
  for (const auto& [dim_qk, dim_v] : {std::pair<Index, Index>{8, 3}, {4, 33}, {2, 1}, {16, 64}})
    for_calls<TestType>(geometry(2, 4, 2, 21, 21, dim_qk, dim_v),
                        [](const auto& runner, auto& call) { check_forward(runner, call); });
}

TEMPLATE_TEST_CASE("heads share keys and values in groups", "[conformance]", float, double) {
  for (const Index kv_heads : {1, 2, 3, 6})
    for_calls<TestType>(geometry(2, 6, kv_heads, 13, 13, 6, 6),
                        [](const auto& runner, auto& call) { check_forward(runner, call); });
}

TEMPLATE_TEST_CASE("forward reads and writes any outer strides and any aligned address",
                   "[conformance]", float, double) {
  for (const Layout layout : kLayouts)
    for_calls<TestType>(
        geometry(2, 4, 2, 18, 18, 10, 10),
        [layout](const auto& runner, auto& call) {
          const auto strided = check_forward(runner, call, layout);
          auto dense = random_call<TestType>(runner.geometry, runner.extra_dim, 1);
          CHECK(same_bits(strided.out.dense(), forward(runner, dense).out.dense()));
        },
        1, layout);
}

TEMPLATE_TEST_CASE("forward agrees with the slow twin under every mask", "[conformance]", float,
                   double) {
  for (const MaskCase<TestType>& mask : mask_cases<TestType>())
    for (const auto& [len_q, len_kv] : {std::pair<Index, Index>{37, 37}, {9, 35}, {35, 9}})
      for_calls<TestType>(geometry(2, 4, 2, len_q, len_kv, 8, 8),
                          [&](const auto& runner, auto& call) {
                            INFO("mask: " << mask.name);
                            call.mask = mask.make(call.geometry);
                            check_forward_in_tiles(runner, call);
                          });
}

TEMPLATE_TEST_CASE(
    "one query of grouped heads agrees with the slow twin under every mask and layout",
    "[conformance]", float, double) {
  for (const MaskCase<TestType>& mask : mask_cases<TestType>())
    for (const bool per_head : {false, true})
      for_calls<TestType>(
          geometry(2, 6, 2, 1, 40, 8, 8),
          [&](const auto& runner, auto& call) {
            INFO("mask: " << mask.name << (per_head ? ", a parameter per head" : ""));
            call.mask = mask.make(call.geometry);
            check_forward_in_tiles(runner, call);
          },
          2, per_head ? Layout::bthd : Layout::dense, per_head);
}

TEMPLATE_TEST_CASE("the scale may be any number, 0 and negative ones included", "[conformance]",
                   float, double) {
  for (const double scale : {1.0, 0.0, -0.5, 3.0, 1e-3})
    for_calls<TestType>(geometry(2, 2, 1, 20, 20, 8, 8), [scale](const auto& runner, auto& call) {
      INFO("scale " << scale);
      call.options.scale = scale;
      check_forward(runner, call);
      call.mask = owned(heed::causal<TestType>() & heed::soft_cap<TestType>(TestType(1.25)));
      check_forward(runner, call);
    });
}

TEMPLATE_TEST_CASE("forward without saved rows has the same bits", "[conformance]", float, double) {
  for_calls<TestType>(geometry(2, 4, 2, 33, 33, 8, 8), [](const auto& runner, auto& call) {
    INFO(runner.name);
    call.options = small_tiles();
    const auto with = forward(runner, call);
    Tensor<TestType> out(call.grad_out.shape());
    runner.forward(call.inputs(), call.mask.mask, out.view(), nullptr, call.options);
    CHECK(same_bits(out.dense(), with.out.dense()));
  });
}

TEST_CASE("in double long rows keep their accuracy", "[conformance]") {
  for_calls<double>(geometry(1, 1, 1, 3, 1500, 16, 16),
                    [](const auto& runner, auto& call) { check_forward(runner, call); });
}

TEST_CASE("in float long rows are as exact as a naive loop's, on average over eight draws",
          "[conformance]") {
  for (const Runner<float>& runner : runners<float, kNeeds>(geometry(1, 1, 1, 3, 1500, 16, 16))) {
    INFO(runner.name);
    double fast_error = 0, naive_error = 0;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      const Call<float> call = random_call<float>(runner.geometry, runner.extra_dim, seed);
      const Twin exact = runner.twin(call), naive = runner.naive(call);
      const auto fast = forward(runner, call).out.dense<double>();
      double here = 0, there = 0;
      for (std::size_t n = 0; n < fast.size(); ++n) {
        here = std::max(here, std::abs(fast[n] - exact.out[n]));
        there = std::max(there, std::abs(naive.out[n] - exact.out[n]));
      }
      fast_error += here;
      naive_error += there;
    }
    CHECK(fast_error <= tolerance::forward_beside_naive(naive_error, 0));
  }
}
