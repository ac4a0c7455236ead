// SPDX-License-Identifier: Apache-2.0
#pragma once

// The backward checks of every variant, for a scalar of choice.

#include "conformance/compare.hpp"

namespace heed_test {

// f(runner, call) for every variant that can run on `g`.
template <class T, Needs needs, class F>
void for_calls(const Geometry& g, F&& f, std::uint64_t seed = 1, Layout layout = Layout::dense,
               bool per_head = true) {
  for (const Runner<T>& runner : all_runners<T, needs>(g, per_head)) {
    Call<T> call = random_call<T>(runner.geometry, runner.extra_dim, seed, layout);
    f(runner, call);
  }
}

// Default and small tiles by turns: both at every shape would take twice the tapes.
template <class T>
void take_turns(Call<T>& call, std::uint64_t turn) {
  if (turn % 3 != 0) call.options = small_tiles();
}

template <class T, Needs needs>
void check_all_lengths() {
  std::uint64_t seed = 0;
  for (const auto& [len_q, len_kv] : kLengths) {
    ++seed;
    for_calls<T, needs>(
        geometry(1, 2, 1, len_q, len_kv, 4, 4),
        [seed](const auto& runner, auto& call) {
          take_turns(call, seed);
          check_backward(runner, call);
        },
        seed);
  }
}

template <class T, Needs needs>
void check_all_dims() {
  for (const Index dim : kDims)
    for_calls<T, needs>(
        geometry(1, 2, 2, 11, 11, dim, dim),
        [dim](const auto& runner, auto& call) {
          take_turns(call, std::uint64_t(dim));
          check_backward(runner, call);
        },
        std::uint64_t(dim));
}

template <class T, Needs needs>
void check_value_dims() {
  for (const auto& [dim_qk, dim_v] : {std::pair<Index, Index>{8, 3}, {4, 33}, {2, 1}})
    for_calls<T, needs>(geometry(2, 4, 2, 10, 10, dim_qk, dim_v),
                        [](const auto& runner, auto& call) { check_backward(runner, call); });
}

template <class T, Needs needs>
void check_groups() {
  for (const Index kv_heads : {1, 2, 3, 6})
    for_calls<T, needs>(geometry(2, 6, kv_heads, 18, 18, 4, 4),
                        [&](const auto& runner, auto& call) {
                          take_turns(call, std::uint64_t(kv_heads));
                          check_backward(runner, call);
                        });
}

// As in decoding: forward may have computed the heads of a group as rows of one head, backward does not.
template <class T, Needs needs>
void check_one_query() {
  std::uint64_t turn = 0;
  for (const MaskCase<T>& mask : mask_cases<T>())
    for (const bool per_head : {false, true})
      for_calls<T, needs>(
          geometry(2, 6, 2, 1, 35, 4, 4),
          [&](const auto& runner, auto& call) {
            INFO("mask: " << mask.name << (per_head ? ", a parameter per head" : ""));
            call.mask = mask.make(call.geometry);
            take_turns(call, ++turn);
            check_backward(runner, call);
          },
          2, Layout::dense, per_head);
}

template <class T, Needs needs>
void check_layouts() {
  for (const Layout layout : kLayouts)
    for_calls<T, needs>(
        geometry(2, 4, 2, 18, 18, 6, 6),
        [layout](const auto& runner, auto& call) {
          const Named strided = check_backward(runner, call, layout);
          const auto dense = random_call<T>(runner.geometry, runner.extra_dim, 1);
          const Named same = backward(runner, dense, forward(runner, dense));
          for (std::size_t t = 0; t < same.size(); ++t) {
            INFO(runner.name << ", gradient of " << same[t].name);
            CHECK(same_bits(strided[t].values, same[t].values));
          }
        },
        1, layout);
}

template <class T, Needs needs>
void check_masks() {
  std::uint64_t turn = 0;
  for (const MaskCase<T>& mask : mask_cases<T>())
    for (const auto& [len_q, len_kv] :
         {std::pair<Index, Index>{20, 20}, {9, 35}, {35, 9}, {1, 35}}) {
      ++turn;
      for_calls<T, needs>(geometry(2, 2, 1, len_q, len_kv, 4, 4),
                          [&](const auto& runner, auto& call) {
                            INFO("mask: " << mask.name);
                            call.mask = mask.make(call.geometry);
                            take_turns(call, turn);
                            check_backward(runner, call);
                          });
    }
}

template <class T, Needs needs>
void check_scales() {
  for (const double scale : {1.0, 0.0, -0.5, 3.0})
    for (const bool capped : {false, true})
      for_calls<T, needs>(geometry(2, 2, 1, 12, 12, 4, 4), [&](const auto& runner, auto& call) {
        INFO("scale " << scale);
        call.options.scale = scale;
        if (capped) call.mask = owned(heed::causal<T>() & heed::soft_cap<T>(T(1.25)));
        check_backward(runner, call);
      });
}

}  // namespace heed_test
