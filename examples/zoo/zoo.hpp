// SPDX-License-Identifier: Apache-2.0
#pragma once

// All variants that programs offer: the library's list, and behind it the zoo's. Both come as heed::Variant and with the
// same traits; nothing tells one from the other but its name.

#include <heed/compiled.hpp>
#include <zoo/list.hpp>

namespace zoo {

// f(Variant<Op>) for every variant of the zoo, as heed::for_each_variant.
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

// The library's variants, then the zoo's.
template <class Real, class F>
void for_each_known_variant(const heed::Geometry& g, F&& f,
                            const heed::VariantOptions& options = {}) {
  heed::for_each_variant<Real>(g, f, options);
  zoo::for_each_zoo_variant<Real>(g, f, options);
}

}  // namespace zoo
