// SPDX-License-Identifier: Apache-2.0
// The list of variants: its statements on a variant's sizes agree with the sizes that the variant's op accepts.

#include "catch.hpp"
#include "misnamed_parameters.hpp"

#include <heed/variants.hpp>

#include <set>
#include <stdexcept>

using namespace heed;

namespace {

template <class Op>
[[nodiscard]] bool accepts(const Variant<Op>& variant) {
  try {
    variant.op.validate(variant.geometry, "variants_test");
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace

TEMPLATE_TEST_CASE("a variant accepts the sizes that the list says, and no others", "", float,
                   double) {
  for (const Index dim_qk : {1, 2, 3, 6, 7})
    for (const Index dim_v : {1, 3, 6})
      for_each_variant<TestType>({1, 2, 2, 1, 5, 5, dim_qk, dim_v}, [&](const auto& variant) {
        INFO(variant.name << ", dim_qk " << dim_qk << ", dim_v " << dim_v);
        const VariantTraits& traits = variant.traits;
        CHECK(accepts(variant) == ((!traits.even_dim_qk || dim_qk % 2 == 0) &&
                                   (!traits.equal_widths || dim_qk == dim_v)));
      });
}

TEST_CASE("a parameter with numbers for other heads is named by what refuses it") {
  for_each_variant<double>({1, 4, 4, 2, 5, 5, 6, 6}, [](const auto& variant) {
    INFO(variant.name);
    CHECK(heed_test::misnamed_parameters(variant.op, variant.geometry) ==
          std::vector<std::string>{});
  });
}

TEST_CASE("every variant has a name of its own, and the baseline comes first") {
  const std::vector<std::string> names = variant_names();
  CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size());
  CHECK(names.front() == kBaseline);
}

TEST_CASE("a variant is made for its layer and its seed") {
  const auto first_numbers = [](const VariantOptions& options) {
    std::vector<double> numbers;
    for_each_variant<double>(
        kSmallSizes,
        [&](auto variant) {
          variant.op.visit([&](const char*, const auto& param) {
            if (param.size() > 1) numbers.push_back(param[0]);
          });
        },
        options);
    return numbers;
  };
  CHECK(first_numbers({}) == first_numbers({.seed = 1}));
  CHECK(first_numbers({}) != first_numbers({.seed = 2}));

  const auto lambda_at = [](Index depth) {
    double lambda = 0;
    for_each_variant<double>(kSmallSizes,
                             [&]<class Op>(const Variant<Op>& variant) {
                               if constexpr (std::is_same_v<Op, DifferentialV1<double>>)
                                 lambda = variant.op.normaliser.lambda_init;
                             },
                             {.depth = depth});
    return lambda;
  };
  CHECK(lambda_at(1) == lambda_init_at(1));
  CHECK(lambda_at(7) == lambda_init_at(7));
}
