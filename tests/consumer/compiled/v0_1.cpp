// SPDX-License-Identifier: Apache-2.0
// Written for heed 0.1. This file never changes: a version that does not compile it has broken its promise
// (.github/CHANGELOG.md says what is public).

#include <heed/check/op_check.hpp>
#include <heed/compiled.hpp>
#include <heed/compiled_engine.hpp>
#include <heed/curvature.hpp>
#include <heed/decode.hpp>
#include <heed/explain.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/packed.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/variants.hpp>
#include <heed/version.hpp>

#include <cmath>
#include <vector>

static_assert(heed::kVersion >= 100);

namespace {

template <class T>
struct Recency {
  heed::Param<T> slope = T(0.5);
  static constexpr auto parameters = std::tuple{heed::named("slope", &Recency::slope)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * heed::distance(pair);
  }
};

constexpr heed::Index kTokens = 6;
constexpr heed::Shape kShape{1, 2, kTokens, 4};

// Rows of equal numbers, which any weights of sum 1 mix into themselves.
struct Rows {
  std::vector<float> numbers = std::vector<float>(2 * kTokens * 4, 0.5F);
  [[nodiscard]] heed::TensorView<float> view() { return {numbers.data(), kShape}; }
  [[nodiscard]] bool mixed() const { return std::abs(numbers.back() - 0.5F) < 1e-6F; }
};

template <class Op>
bool both_passes(const Op& op, const heed::Mask<float>& mask) {
  Rows query, key, value, out, moved, grad_query, grad_key, grad_value;
  const heed::Inputs<float> in{query.view(), key.view(), value.view()};
  heed::Options options;
  options.threads = 1;
  options.scale = 0.5;
  heed::Saved<float> saved;
  Op grad_op;
  heed::forward(op, in, mask, out.view(), &saved, options);
  heed::backward(op, in, mask, saved, out.view(), value.view(),
                 {grad_query.view(), grad_key.view(), grad_value.view()}, &grad_op, options);
  heed::jvp(op, in, mask, saved, out.view(), {query.view()}, moved.view(), nullptr, options);
  return out.mixed();
}

bool decodes() {
  Rows query, key, value, out;
  heed::KvCache<float> cache(1, 2, 4, 4);
  cache.append(key.view(), value.view());
  heed::forward(heed::Dar<float>(), cache.inputs(query.view()),
                heed::causal<float>(heed::Align::bottom_right), out.view());
  return cache.len() == kTokens && out.mixed();
}

bool packs() {
  Rows query, key, value, out;
  heed::Packed<float> lengths{.queries = {0, 2, kTokens}};
  const heed::PackedInputs<float> in({query.view(), key.view(), value.view()}, &lengths);
  heed::forward(heed::ScaledDot<float>(), in, heed::causal<float>(), out.view());
  return out.mixed();
}

}  // namespace

int main() {
  using heed::Mask;
  bool right = heed::variant_names().size() >= 14 && decodes() && packs();
  for (const Mask<float>& mask :
       {Mask<float>(), heed::causal<float>(), heed::window<float>(2, 0),
        heed::causal<float>() & heed::key_lengths<float>({4}), heed::soft_cap<float>(3)})
    right = right && both_passes(heed::ScaledDot<float>(), mask) &&
            both_passes(heed::Dar<float>(), mask) &&
            both_passes(heed::ResonantOde<float>(), mask) &&
            both_passes(heed::OwnAttention<Recency, float>(), mask);
  return right && heed::check_op(heed::OwnAttention<Recency, float>()).passed() ? 0 : 1;
}
