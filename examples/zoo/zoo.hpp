// SPDX-License-Identifier: Apache-2.0
#pragma once

// All variants that programs offer: the library's list, and behind it the zoo's. Both are
// heed::Variants with the same traits; only the names tell them apart.

#include <heed/compiled.hpp>
#include <zoo/list.hpp>

namespace zoo {

// Calls f(Variant<Op>) for every variant of the zoo, as heed::for_each_variant.
template <class Real, class F>
void for_each_zoo_variant(const heed::Geometry& g, F&& f,
                          const heed::VariantOptions& options = {}) {
  for_each_entry<Real>(g, [&]<class Op>(heed::Variant<Op> variant, const auto&) {
    heed::detail::fill_tensors(variant.op, options.seed);
    f(variant);
  });
}
[[nodiscard]] inline std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for_each_zoo_variant<float>(heed::kSmallSizes,
                              [&](const auto& variant) { names.push_back(variant.name); });
  return names;
}

// Calls f for the library's variants, then for the zoo's.
template <class Real, class F>
void for_each_known_variant(const heed::Geometry& g, F&& f,
                            const heed::VariantOptions& options = {}) {
  heed::for_each_variant<Real>(g, f, options);
  zoo::for_each_zoo_variant<Real>(g, f, options);
}

}  // namespace zoo
